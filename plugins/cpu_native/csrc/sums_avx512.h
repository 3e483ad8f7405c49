// See sums.h. With AVX-512 and its dot product of bf16.
#pragma once

#include <cstdint>
#include <cstring>

#include <immintrin.h>

#include "sums.h"

namespace {

// See `rows_times_tiles`. What Rows and Tiles consist of comes one by one: a core stalls where it has just stored the
// parts of a struct and loads it as a whole.
template <int R, int C>
__attribute__((noinline)) void sum_products(const bf16* a, size_t row, size_t a_step, const bf16* b, size_t apart,
                                            size_t b_step, int steps, float* c, size_t ld, bool add) {
  __m512 sums[R][C];
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i)
    for (int half = 0; half < C; ++half)
      sums[i][half] = add ? _mm512_loadu_ps(c + i * ld + half * 16) : _mm512_setzero_ps();
  for (int s = 0; s < steps; ++s, a += a_step, b += b_step) {
#pragma GCC unroll 4
    for (int p = 0; p < 16; ++p) {
      __m512bh right[C];
      for (int half = 0; half < C; ++half) right[half] = (__m512bh)_mm512_load_si512(b + half * apart + p * 32);
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) {
        int32_t pair;
        memcpy(&pair, a + i * row + p * 2, 4);
        const __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
        for (int half = 0; half < C; ++half) sums[i][half] = _mm512_dpbf16_ps(sums[i][half], left, right[half]);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i)
    for (int half = 0; half < C; ++half) _mm512_storeu_ps(c + i * ld + half * 16, sums[i][half]);
}

// c[R][C * 16] (+)= rows * tiles, over `steps` times 32 columns of the rows. All sums stay in registers: with less than
// 12 of them a core would wait for each. Rows of c are `ld` apart.
template <int R, int C>
inline void rows_times_tiles(const Rows& a, const Tiles& b, int steps, float* c, size_t ld, bool add) {
  sum_products<R, C>(a.data, a.row, a.step, b.data, b.apart, b.step, steps, c, ld, add);
}

// The same for up to 8 rows. An odd number of them takes one more along, whose sums are not read: there is room for it
// both in a Left and in c.
inline void some_rows(int rows, const Rows& a, const Tiles& b, int steps, float* c, size_t ld, bool add) {
  switch ((rows + 1) / 2) {
    case 1: return rows_times_tiles<2, 2>(a, b, steps, c, ld, add);
    case 2: return rows_times_tiles<4, 2>(a, b, steps, c, ld, add);
    case 3: return rows_times_tiles<6, 2>(a, b, steps, c, ld, add);
    default: return rows_times_tiles<8, 2>(a, b, steps, c, ld, add);
  }
}

// c[rows][16] = up to 8 rows * one column of tiles, which follow each other.
inline void rows_times_strip(int rows, const Rows& a, const bf16* tiles, int steps, float* c) {
  const Tiles b{tiles, 0, 512};
  switch (rows) {
    case 1: return rows_times_tiles<1, 1>(a, b, steps, c, 16, false);
    case 2: return rows_times_tiles<2, 1>(a, b, steps, c, 16, false);
    case 3: return rows_times_tiles<3, 1>(a, b, steps, c, 16, false);
    case 4: return rows_times_tiles<4, 1>(a, b, steps, c, 16, false);
    case 5: return rows_times_tiles<5, 1>(a, b, steps, c, 16, false);
    case 6: return rows_times_tiles<6, 1>(a, b, steps, c, 16, false);
    case 7: return rows_times_tiles<7, 1>(a, b, steps, c, 16, false);
    default: return rows_times_tiles<8, 1>(a, b, steps, c, 16, false);
  }
}

}  // namespace
