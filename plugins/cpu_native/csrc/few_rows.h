// Blocks of products of up to 32 rows, whose weights come from memory and are used once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include <immintrin.h>

#include "blocks.h"
#include "matrix.h"
#include "unpack.h"

namespace {

#ifdef PB_AVX512
// c[M][NB] = a[M, k] * (block nb of w)^T straight from packed weights, for a few rows, of which a step is `stride`
// numbers from the next: every number is used where it was unpacked.
template <Format F, int M>
inline void dot_block(const bf16* a, size_t stride, const Matrix& w, int nb, float* c) {
  // A sum is ready some cycles after it was begun; of one or two rows' there would be too few to wait for.
  constexpr int PARTS = M <= 2 ? 2 : 1;
  const Unpacker<F> unpacker(w);
  const uint8_t* p = w.block(nb);
  __m512 sums[M][2][PARTS];
  for (auto& row : sums)
    for (auto& half : row)
      for (auto& one : half) one = _mm512_setzero_ps();
  for (int s = 0; s < w.steps(); ++s, p += step_bytes(F), a += stride) {
    int seen = 0;  // memory is asked in its own order
    unpacker.template step<PARTS == 1>(p, [&](int r, __m512i row) {
      ask_ahead<step_bytes(F), 32>(p, seen++);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        int32_t pair;
        memcpy(&pair, a + i * KB + r % 16 * 2, 4);
        __m512& sum = sums[i][r / 16][r % PARTS];
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)row);
      }
    });
  }
  for (int i = 0; i < M; ++i)
    for (int half = 0; half < 2; ++half) {
      const __m512* parts = sums[i][half];
      _mm512_storeu_ps(c + i * NB + half * 16, PARTS == 1 ? parts[0] : _mm512_add_ps(parts[0], parts[PARTS - 1]));
    }
}

// How many rows are multiplied without tiles.
constexpr int most_dots(Format f) {
#ifdef PB_AMX
  return in_strips(f) ? 1 : 2;
#else
  return in_strips(f) ? 12 : MB;
#endif
}

// The sum of each of 16 registers.
inline __m512 sums_of(const __m512 (&x)[16]) {
  __m512 pairs[8], fours[4], eights[2];
  for (int i = 0; i < 8; ++i)
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[i * 2], x[i * 2 + 1]), _mm512_unpackhi_ps(x[i * 2], x[i * 2 + 1]));
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(pairs[i * 2]), b = _mm512_castps_pd(pairs[i * 2 + 1]);
    fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const auto join = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  for (int i = 0; i < 2; ++i) eights[i] = join(fours[i * 2], fours[i * 2 + 1]);
  return join(eights[0], eights[1]);
}

#ifdef PB_AMX
// The same for weights in strips, and one row of which a step is `stride` numbers from the next: 16 parts of a sum for
// each row of a strip, added up at the end.
template <Format F>
inline void dot_strips(const bf16* a, size_t stride, const Matrix& w, int nb, float* c) {
  const StripUnpacker<F> unpacker;
  const uint8_t* p = w.block(nb);
  for (int half = 0; half < 2; ++half) {
    __m512 sums[STRIP];
    for (auto& one : sums) one = _mm512_setzero_ps();
    for (int s = 0; s < w.steps(); ++s, p += strip_bytes(F)) {
      const __m512bh left = (__m512bh)_mm512_loadu_si512(a + s * stride);
      unpacker.step(p, [&](int r, __m512i row) {
        ask_ahead<strip_bytes(F), STRIP>(p, r);
        sums[r] = _mm512_dpbf16_ps(sums[r], left, (__m512bh)row);
      });
    }
    _mm512_storeu_ps(c + half * STRIP, sums_of(sums));
  }
}
#else
// The same for weights in strips and M rows, of which a step is `stride` numbers from the next: R rows of a strip at a
// time, over all steps, so that all sums stay in registers: 16 parts of each, added up at the end. `grids` holds the
// scales of a strip.
template <Format F, int M, int R>
inline void dot_strips(const bf16* a, size_t stride, const Matrix& w, int nb, float* grids, float* c) {
  constexpr int SOME = grid_floats(F);
  const int steps = w.steps();
  for (int half = 0; half < 2; ++half) {
    const uint8_t* strip = w.strip(nb, half);
    const size_t bytes = steps * strip_bytes(F);
    // Memory is asked for the next strip, as many lines per step as R rows of it have.
    const char *ahead = reinterpret_cast<const char*>(strip) + bytes, *const ahead_end = ahead + bytes;
    constexpr int LINES = int((strip_bytes(F) * R / STRIP + 63) / 64);
    for (int s = 0; s < steps; ++s) StripUnpacker<F>::grids(strip + s * strip_bytes(F), grids + s * SOME);
    __m512 sums[M][STRIP];
    for (int first = 0; first < STRIP; first += R) {
      const StripRows<F, R> unpacker(first);
      __m512 now[R][M];
      for (auto& row : now)
        for (auto& one : row) one = _mm512_setzero_ps();
      const uint8_t* p = strip;
      const bf16* left = a;
      const float* grid = grids;
      for (int s = 0; s < steps; ++s, p += strip_bytes(F), left += stride, grid += SOME) {
        for (int line = 0; line < LINES && ahead < ahead_end; ++line, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T0);
        __m512i rows[R];
        unpacker.step(p, grid, rows);
#pragma GCC unroll 8
        for (int j = 0; j < M; ++j) {
          const __m512bh numbers = (__m512bh)_mm512_loadu_si512(left + j * KB);
#pragma GCC unroll 8
          for (int i = 0; i < R; ++i) now[i][j] = _mm512_dpbf16_ps(now[i][j], (__m512bh)rows[i], numbers);
        }
      }
      for (int i = 0; i < R; ++i)
        for (int j = 0; j < M; ++j) sums[j][first + i] = now[i][j];
    }
    for (int j = 0; j < M; ++j) _mm512_storeu_ps(c + j * NB + half * STRIP, sums_of(sums[j]));
  }
}

// The same for m rows, 8 at a time.
template <Format F>
inline void dot_some_strips(const bf16* a, int height, int m, const Matrix& w, int nb, bf16* scratch, float* c) {
  float* grids = reinterpret_cast<float*>(scratch);
  const size_t stride = size_t(height) * KB;
  for (; m > 0; m -= 8, a += 8 * KB, c += 8 * NB) switch (m) {
      case 1: dot_strips<F, 1, 4>(a, stride, w, nb, grids, c); break;
      case 2: dot_strips<F, 2, 8>(a, stride, w, nb, grids, c); break;
      case 3: dot_strips<F, 3, 4>(a, stride, w, nb, grids, c); break;
      case 4: dot_strips<F, 4, 4>(a, stride, w, nb, grids, c); break;
      case 5: dot_strips<F, 5, 2>(a, stride, w, nb, grids, c); break;
      case 6: dot_strips<F, 6, 2>(a, stride, w, nb, grids, c); break;
      case 7: dot_strips<F, 7, 2>(a, stride, w, nb, grids, c); break;
      default: dot_strips<F, 8, 2>(a, stride, w, nb, grids, c); break;
    }
}
#endif

// The same for weights that are not in strips.
template <Format F>
inline void dot_some(const bf16* a, int height, int m, const Matrix& w, int nb, float* c) {
  const size_t stride = size_t(height) * KB;
  for (; m > 0; m -= 8, a += 8 * KB, c += 8 * NB) switch (m) {
      case 1: dot_block<F, 1>(a, stride, w, nb, c); break;
      case 2: dot_block<F, 2>(a, stride, w, nb, c); break;
#ifndef PB_AMX
      case 3: dot_block<F, 3>(a, stride, w, nb, c); break;
      case 4: dot_block<F, 4>(a, stride, w, nb, c); break;
      case 5: dot_block<F, 5>(a, stride, w, nb, c); break;
      case 6: dot_block<F, 6>(a, stride, w, nb, c); break;
      case 7: dot_block<F, 7>(a, stride, w, nb, c); break;
      default: dot_block<F, 8>(a, stride, w, nb, c); break;
#endif
    }
}

// Up to 32 rows as the right side of a product whose left side is weights: for every step a tile or two of 16 pairs of
// columns x 16 rows x 2.
inline void turn_left(const Left& a, int m, int steps, bf16* to) {
  for (int s = 0; s < steps; ++s)
    for (int r = 0; r < m; r += 16, to += 512) {
      __m512i rows[16];
      for (int i = 0; i < 16; ++i)
        rows[i] = r + i < m ? _mm512_loadu_si512(a.p + (size_t(s) * a.height + r + i) * KB) : _mm512_setzero_si512();
      transpose16(rows);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i * 32, rows[i]);
    }
}

// c[m][NB] (16 columns of it) of sums float [16][32], for m <= 32.
inline void turn_sums(const float* sums, int m, float* c) {
  for (int r = 0; r < m; r += 16) {
    __m512i rows[16];
    for (int i = 0; i < 16; ++i) rows[i] = _mm512_load_si512(sums + i * MB + r);
    transpose16(rows);
    for (int i = 0; i < std::min(16, m - r); ++i) _mm512_storeu_si512(c + (r + i) * NB, rows[i]);
  }
}
#endif

#ifdef PB_AMX
// c[m][NB] of weights in strips and what `turn_left` has made of m <= 32 rows. `scratch` holds a step. One strip after
// the other: both together would load fewer tiles, but memory is read best in one long run.
template <Format F>
inline void strips_block(const bf16* turned, int m, const Matrix& w, int nb, bf16* scratch, float* c) {
  const StripUnpacker<F> unpacker;
  const bool both = m > 16;
  const int steps = w.steps();
  set_tiles(16, 16);
  for (int half = 0; half < 2; ++half) {
    const uint8_t* p = w.strip(nb, half);
    const bf16* right = turned;
    const auto unpack = [&](int s, auto&& between) {
      bf16* to = scratch + (s & 1) * (STEP / 2);
      unpacker.step(p, [&](int r, __m512i row) {
        ask_ahead<strip_bytes(F), STRIP>(p, r);
        _mm512_store_si512(to + r * KB, row);
        between(r);
      });
      p += strip_bytes(F);
    };
    const auto multiply = [&](int s, int part) {
      if (part == 0) {
        _tile_loadd(4, scratch + (s & 1) * (STEP / 2), KB * 2);
        _tile_loadd(6, right, 64);
        _tile_dpbf16ps(0, 4, 6);
      } else if (both) {
        _tile_loadd(7, right + 512, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
    };
    _tile_zero(0);
    _tile_zero(1);
    unpack(0, [](int) {});
    for (int s = 0; s < steps; ++s, right += both ? 1024 : 512)
      if (s + 1 < steps)
        unpack(s + 1, [&](int r) {
          if (r % 8 == 0) multiply(s, r / 8);
        });
      else
        for (int part = 0; part < 2; ++part) multiply(s, part);
    alignas(64) float sums[STRIP * MB];
    _tile_stored(0, sums, MB * sizeof(float));
    if (both) _tile_stored(1, sums + 16, MB * sizeof(float));
    turn_sums(sums, m, c + half * STRIP);
  }
}

// The same for up to 32 rows of plain weights, which come from memory.
inline void plain_block(const bf16* a, int height, int m, const Matrix& w, int nb, float* c) {
  const bf16* tiles = reinterpret_cast<const bf16*>(w.block(nb));
  const bool both = m > 16;
  begin_sums(m, c, false);
  for (int s = 0; s < w.steps(); ++s, a += height * KB, tiles += STEP)
#pragma GCC unroll 32
    for (int r = 0; r < 32; ++r) {
      ask_ahead<step_bytes(BF16), 32>(reinterpret_cast<const uint8_t*>(tiles), r);
      if (r % 8 == 0) quarter<false>(r / 8, both, a, tiles);
    }
  end_sums(m, c);
}
#endif

#if defined(PB_AVX512) && !defined(PB_AMX)
// c[m][NB] of weights in strips and what `turn_left` has made of m <= 32 rows. `scratch` holds a few steps. Rows of
// weights are the left side, as they come: as the right side each 16 of them would have to be transposed.
template <Format F>
inline void strips_block(const bf16* turned, int m, const Matrix& w, int nb, bf16* scratch, float* c) {
  const StripUnpacker<F> unpacker;
  const int steps = w.steps(), columns = m > 16 ? 2 : 1;
  const uint8_t* p = w.block(nb);
  for (int half = 0; half < 2; ++half) {
    alignas(64) float sums[STRIP * MB];
    const bf16* right = turned;
    for (int s = 0; s < steps; s += UNPACKED) {
      const int n = std::min(UNPACKED, steps - s);
      for (int i = 0; i < n; ++i, p += strip_bytes(F))
        unpacker.step(p, [&](int r, __m512i row) {
          ask_ahead<strip_bytes(F), STRIP>(p, r);
          _mm512_store_si512(scratch + (i * STRIP + r) * KB, row);
        });
      const Tiles tiles{right, 512, size_t(columns) * 512};
      constexpr size_t STEP_OF_STRIP = STRIP * KB;
      if (columns == 1)
        rows_times_tiles<16, 1>({scratch, KB, STEP_OF_STRIP}, tiles, n, sums, MB, s > 0);
      else
        for (int r = 0; r < STRIP; r += 8)
          rows_times_tiles<8, 2>({scratch + r * KB, KB, STEP_OF_STRIP}, tiles, n, sums + r * MB, MB, s > 0);
      right += n * tiles.step;
    }
    turn_sums(sums, m, c + half * STRIP);
  }
}
#endif

// c[m rows][NB] += what of block nb is kept apart, times a: for the few rows whose weights are nowhere unpacked.
inline void add_rest(const Matrix& w, const Left& a, int m, int nb, float* c) {
  for (int i = w.rest_from[nb]; i < w.rest_from[nb + 1]; ++i) {
    const Matrix::Rest& one = w.rest[i];
    const bf16* from = a.row(0).at(one.column);
    for (int r = 0; r < m; ++r) c[r * NB + one.row] += to_float(from[r * KB]) * to_float(one.value);
  }
}

// c[m][NB] = a[m, k] * (block nb of w)^T for m <= 32. `turned` is what `turn_left` made of a, where it is of use;
// `scratch` holds an unpacked block.
template <Format F>
inline void block(const Left& a, const bf16* turned, int m, const Matrix& w, int nb, bf16* scratch, float* c) {
#ifdef PB_AVX512
  if (m <= most_dots(F)) {
    if constexpr (!in_strips(F)) {
      dot_some<F>(a.p, a.height, m, w, nb, c);
    } else {
#ifdef PB_AMX
      for (int i = 0; i < m; ++i) dot_strips<F>(a.p + i * KB, size_t(a.height) * KB, w, nb, c + i * NB);
#else
      dot_some_strips<F>(a.p, a.height, m, w, nb, scratch, c);
#endif
    }
    return add_rest(w, a, m, nb, c);
  }
  if constexpr (in_strips(F)) {
    strips_block<F>(turned, m, w, nb, scratch, c);
    return add_rest(w, a, m, nb, c);
  }
#endif
  if constexpr (F == BF16) {
#ifdef PB_AMX
    plain_block(a.p, a.height, m, w, nb, c);
#else
    tile_block(a.p, a.height, m, reinterpret_cast<const bf16*>(w.block(nb)), w.steps(), c, false, [] {});
#endif
  } else {
    (void)turned;
    Cursor<F> from(w, nb);
    packed_block<F, false>(a.p, a.height, m, from, w.steps(), scratch, c, false, [] {});
  }
}

}  // namespace
