// See sums.h. With AVX2.
#pragma once

#include <cstdint>
#include <cstring>

#include <immintrin.h>

#include "sums.h"

namespace {

// c[R][16] (+)= rows * one column of tiles. Of a pair, the one in the lower half of 32 bits comes first.
template <int R>
inline void rows_times_column(const Rows& a, const bf16* b, size_t b_step, int steps, float* c, size_t ld, bool add) {
  const __m256i upper = _mm256_set1_epi32(int(0xffff0000));
  const auto first = [](__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); };
  const auto second = [&](__m256i pairs) { return _mm256_castsi256_ps(_mm256_and_si256(pairs, upper)); };
  __m256 sums[R][2];
  for (int i = 0; i < R; ++i)
    for (int half = 0; half < 2; ++half)
      sums[i][half] = add ? _mm256_loadu_ps(c + i * ld + half * 8) : _mm256_setzero_ps();
  for (int s = 0; s < steps; ++s, b += b_step)
    for (int p = 0; p < 16; ++p) {
      const __m256i low = _mm256_loadu_si256((const __m256i*)(b + p * 32));
      const __m256i high = _mm256_loadu_si256((const __m256i*)(b + p * 32 + 16));
      const __m256 even[2] = {first(low), first(high)}, odd[2] = {second(low), second(high)};
      for (int i = 0; i < R; ++i) {
        int32_t pair;
        memcpy(&pair, a.data + s * a.step + i * a.row + p * 2, 4);
        const __m256i left = _mm256_set1_epi32(pair);
        for (int half = 0; half < 2; ++half) {
          sums[i][half] = _mm256_fmadd_ps(first(left), even[half], sums[i][half]);
          sums[i][half] = _mm256_fmadd_ps(second(left), odd[half], sums[i][half]);
        }
      }
    }
  for (int i = 0; i < R; ++i)
    for (int half = 0; half < 2; ++half) _mm256_storeu_ps(c + i * ld + half * 8, sums[i][half]);
}

// c[rows][32] (+)= rows * tiles, over `steps` times 32 columns of the rows, which are `ld` apart in c.
inline void some_rows(int rows, const Rows& a, const Tiles& b, int steps, float* c, size_t ld, bool add) {
  for (int column = 0; column < 2; ++column) {
    const bf16* tiles = b.data + column * b.apart;
    for (int r = 0; r < rows; r += 4) {
      const Rows some{a.data + r * a.row, a.row, a.step};
      float* to = c + r * ld + column * 16;
      switch (rows - r) {
        case 1: rows_times_column<1>(some, tiles, b.step, steps, to, ld, add); break;
        case 2: rows_times_column<2>(some, tiles, b.step, steps, to, ld, add); break;
        case 3: rows_times_column<3>(some, tiles, b.step, steps, to, ld, add); break;
        default: rows_times_column<4>(some, tiles, b.step, steps, to, ld, add); break;
      }
    }
  }
}

// c[rows][16] = up to 8 rows * one column of tiles, which follow each other.
inline void rows_times_strip(int rows, const Rows& a, const bf16* tiles, int steps, float* c) {
  for (int r = 0; r < rows; r += 4) {
    const Rows some{a.data + r * a.row, a.row, a.step};
    switch (rows - r) {
      case 1: rows_times_column<1>(some, tiles, 512, steps, c + r * 16, 16, false); break;
      case 2: rows_times_column<2>(some, tiles, 512, steps, c + r * 16, 16, false); break;
      case 3: rows_times_column<3>(some, tiles, 512, steps, c + r * 16, 16, false); break;
      default: rows_times_column<4>(some, tiles, 512, steps, c + r * 16, 16, false); break;
    }
  }
}

}  // namespace
