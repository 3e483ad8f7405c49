// The left side of products, and blocks of sums: up to 32 rows by 32 columns.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include <immintrin.h>

#include "matrix.h"
#include "numbers.h"
#include "tiles.h"
#include "unpack.h"

namespace {

// ---- the left side ----

// The left side of products as tiles read it: for every 32 rows (or all, where there are fewer) and step of 32 columns
// the rows' parts of it, one after another. Columns up to a multiple of 32 have to be zero.
struct Left {
  bf16* p;
  int steps, height;  // steps of a row; rows together

  Left(bf16* p, int columns, int rows) : p(p), steps((columns + KB - 1) / KB), height(std::min(rows, MB)) {}
  static size_t size(int columns, int rows) { return size_t(round_up(columns, KB)) * round_up(rows, MB); }

  struct Row {
    bf16* p;
    size_t step;
    bf16* at(int column) const { return p + column / KB * step + column % KB; }
    void zero_from(int column) const {
      if (column % KB) memset(at(column), 0, (KB - column % KB) * sizeof(bf16));
    }
  };
  Row row(int i) const { return {rows(i / MB * MB) + i % MB * KB, size_t(height) * KB}; }
  // From row i on, a multiple of 32; the next step is `height` * 32 numbers further.
  bf16* rows(int i) const { return p + size_t(i) * steps * KB; }
};

// ---- blocks of sums ----

#ifdef PB_AMX
// Four tiles of sums [m0|m1, 16 + 16], of up to 32 rows: begun with zeros, or with what is in c.
inline void begin_sums(int m, const float* c, bool add) {
  const int m0 = std::min(m, 16), m1 = m - m0;
  set_tiles(m0, m1);
  if (!add) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    return;
  }
  tile_load_passing(0, c, NB * 4);
  tile_load_passing(1, c + 16, NB * 4);
  if (!m1) return;
  tile_load_passing(2, c + 16 * NB, NB * 4);
  tile_load_passing(3, c + 16 * NB + 16, NB * 4);
}

inline void end_sums(int m, float* c) {
  _tile_stored(0, c, NB * 4);
  _tile_stored(1, c + 16, NB * 4);
  if (m <= 16) return;
  _tile_stored(2, c + 16 * NB, NB * 4);
  _tile_stored(3, c + 16 * NB + 16, NB * 4);
}

// A quarter of a step, in the order that loads each tile once. With PASSING the left side streams by.
template <bool PASSING>
inline void quarter(int which, bool both, const bf16* left, const bf16* right) {
  if (which == 0) {
    if constexpr (PASSING)
      tile_load_passing(4, left, KB * 2);
    else
      _tile_loadd(4, left, KB * 2);
    _tile_loadd(6, right, 64);
    _tile_dpbf16ps(0, 4, 6);
  } else if (which == 1) {
    _tile_loadd(7, right + 512, 64);
    _tile_dpbf16ps(1, 4, 7);
  } else if (both && which == 2) {
    if constexpr (PASSING)
      tile_load_passing(5, left + 16 * KB, KB * 2);
    else
      _tile_loadd(5, left + 16 * KB, KB * 2);
    _tile_dpbf16ps(2, 5, 6);
  } else if (both) {
    _tile_dpbf16ps(3, 5, 7);
  }
}
#endif

// Steps that are unpacked and then multiplied with: they are still in the first level's cache, and sums, which pass
// through memory in between, do so seldom.
constexpr int UNPACKED = 8;

#ifndef PB_AMX
// Where rows of 32 columns each are, how far a row is from the next, and the next 32 columns of them: in numbers.
struct Rows {
  const bf16* p;
  size_t row, step;
};

// Tiles of 16 pairs x 16 columns: the first, how far the one with the next 16 columns is, and the one with the next
// pairs.
struct Tiles {
  const bf16* p;
  size_t apart, step;
};

#ifdef PB_AVX512
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
  sum_products<R, C>(a.p, a.row, a.step, b.p, b.apart, b.step, steps, c, ld, add);
}

// The same for up to 8 rows. An odd number of them takes one more along, whose sums nobody reads: there is room for it
// both in a Left and in c.
inline void some_rows(int rows, const Rows& a, const Tiles& b, int steps, float* c, size_t ld, bool add) {
  switch ((rows + 1) / 2) {
    case 1: return rows_times_tiles<2, 2>(a, b, steps, c, ld, add);
    case 2: return rows_times_tiles<4, 2>(a, b, steps, c, ld, add);
    case 3: return rows_times_tiles<6, 2>(a, b, steps, c, ld, add);
    default: return rows_times_tiles<8, 2>(a, b, steps, c, ld, add);
  }
}
#else
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
        memcpy(&pair, a.p + s * a.step + i * a.row + p * 2, 4);
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
    const bf16* tiles = b.p + column * b.apart;
    for (int r = 0; r < rows; r += 4) {
      const Rows some{a.p + r * a.row, a.row, a.step};
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
#endif
#endif

// c[m][NB] (+)= a[m, steps * KB] * tiles^T, for m <= 32 rows that are together in a Left of `height`, and unpacked
// `tiles`. `meanwhile()` is called once per step: what else there is to do fits between tiles.
template <class Fn>
inline void tile_block(const bf16* a, int height, int m, const bf16* tiles, int steps, float* c, bool add,
                       Fn&& meanwhile) {
#if defined(PB_AMX)
  begin_sums(m, c, add);
  const auto all = [&](bool both) {
    for (int s = 0; s < steps; ++s, a += height * KB, tiles += STEP) {
      for (int which = 0; which < 4; ++which) quarter<true>(which, both, a, tiles);
      meanwhile();
    }
  };
  if (m > 16)
    all(true);
  else
    all(false);
  end_sums(m, c);
#else
  const int groups = (m + 7) / 8;
  for (int g = 0; g < groups; ++g) {
    const int r = g * 8, rows = std::min(8, m - r);
    some_rows(rows, {a + r * KB, KB, size_t(height) * KB}, {tiles, 512, STEP}, steps, c + r * NB, NB, add);
    for (int s = steps * g / groups; s < steps * (g + 1) / groups; ++s) meanwhile();
  }
#endif
}

// The same of packed weights: tiles work on a step while the next is unpacked. If KEEP, all steps are in `tiles`
// afterwards; if not, `tiles` holds a few.
template <Format F, bool KEEP, class Fn>
inline void packed_block(const bf16* a, int height, int m, Cursor<F>& from, int steps, bf16* tiles, float* c, bool add,
                         Fn&& meanwhile) {
#ifdef PB_AMX
  begin_sums(m, c, add);
  const bool both = m > 16;
  const auto place_of = [&](int s) { return tiles + (KEEP ? s : s & 1) * STEP; };
  from.unpack(place_of(0), [](int) {});
  for (int s = 0; s < steps; ++s, a += height * KB) {
    const bf16* now = place_of(s);
    if (s + 1 < steps)
      from.unpack(place_of(s + 1), [&](int r) {
        if (r % 8 == 0) quarter<KEEP>(r / 8, both, a, now);
      });
    else
      for (int which = 0; which < 4; ++which) quarter<KEEP>(which, both, a, now);
    meanwhile();
  }
  end_sums(m, c);
#else
  for (int s = 0; s < steps; s += UNPACKED) {
    const int n = std::min(UNPACKED, steps - s);
    bf16* to = KEEP ? tiles + s * STEP : tiles;
    for (int i = 0; i < n; ++i) from.unpack(to + i * STEP, [](int) {});
    tile_block(a + size_t(s) * height * KB, height, m, to, n, c, add || s > 0, meanwhile);
  }
#endif
}

}  // namespace
