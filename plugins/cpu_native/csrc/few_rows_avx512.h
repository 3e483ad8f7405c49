// See few_rows.h. Dot products, or a few rows of sums in registers.
#pragma once

#include <algorithm>
#include <cstdint>

#include <immintrin.h>

#include "dots_avx512.h"
#include "few_rows.h"
#include "sums.h"

namespace {

// How many rows are multiplied by dot products.
constexpr int most_dots(Format f) { return in_strips(f) ? 12 : MB; }

// What `turn_left` makes of a, for `block`; null where it needs none.
template <Format F>
inline const bf16* right_side(const Left& a, int m, int steps, Buffer<bf16>& space) {
  return in_strips(F) && m > most_dots(F) ? turned(a, m, steps, space) : nullptr;
}

// The same as `dot_block` for weights in strips and M rows, of which a step is `stride` numbers from the next: R rows
// of a strip at a time, over all steps, so that all sums stay in registers: 16 parts of each, added up at the end.
// `grids` holds the scales of a strip. ALIKE: several steps have the same ones.
template <Format F, int M, int R, bool ALIKE>
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
      StripRows<F, R> unpacker(first);
      __m512 now[R][M];
      for (auto& row : now)
        for (auto& one : row) one = _mm512_setzero_ps();
      const uint8_t* p = strip;
      const bf16* left = a;
      const float* grid = grids;
      int same = 0;  // steps to come with the scales of this one
      for (int s = 0; s < steps; ++s, p += strip_bytes(F), left += stride, grid += SOME) {
        for (int line = 0; line < LINES && ahead < ahead_end; ++line, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T0);
        __m512i rows[R];
        if constexpr (ALIKE) {
          if (!same--) unpacker.begin(grid), same = w.alike - 1;
          unpacker.step(p, rows);
        } else {
          unpacker.step(p, grid, rows);
        }
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
template <Format F, bool ALIKE>
inline void dot_some_strips(const bf16* a, int height, int m, const Matrix& w, int nb, bf16* scratch, float* c) {
  float* grids = reinterpret_cast<float*>(scratch);
  const size_t stride = size_t(height) * KB;
  for (; m > 0; m -= 8, a += 8 * KB, c += 8 * NB) switch (m) {
      case 1: dot_strips<F, 1, 4, ALIKE>(a, stride, w, nb, grids, c); break;
      case 2: dot_strips<F, 2, 8, ALIKE>(a, stride, w, nb, grids, c); break;
      case 3: dot_strips<F, 3, 4, ALIKE>(a, stride, w, nb, grids, c); break;
      case 4: dot_strips<F, 4, 4, ALIKE>(a, stride, w, nb, grids, c); break;
      case 5: dot_strips<F, 5, 2, ALIKE>(a, stride, w, nb, grids, c); break;
      case 6: dot_strips<F, 6, 2, ALIKE>(a, stride, w, nb, grids, c); break;
      case 7: dot_strips<F, 7, 2, ALIKE>(a, stride, w, nb, grids, c); break;
      default: dot_strips<F, 8, 2, ALIKE>(a, stride, w, nb, grids, c); break;
    }
}

// The same for weights that are not in strips.
template <Format F>
inline void dot_some(const bf16* a, int height, int m, const Matrix& w, int nb, float* c) {
  const size_t stride = size_t(height) * KB;
  for (; m > 0; m -= 8, a += 8 * KB, c += 8 * NB) switch (m) {
      case 1: dot_block<F, 1>(a, stride, w, nb, c); break;
      case 2: dot_block<F, 2>(a, stride, w, nb, c); break;
      case 3: dot_block<F, 3>(a, stride, w, nb, c); break;
      case 4: dot_block<F, 4>(a, stride, w, nb, c); break;
      case 5: dot_block<F, 5>(a, stride, w, nb, c); break;
      case 6: dot_block<F, 6>(a, stride, w, nb, c); break;
      case 7: dot_block<F, 7>(a, stride, w, nb, c); break;
      default: dot_block<F, 8>(a, stride, w, nb, c); break;
    }
}

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

// c[m][NB] = a[m, k] * (block nb of w)^T for m <= 32. `turned` is what `turn_left` made of a, where it is of use;
// `scratch` holds an unpacked block.
template <Format F>
inline void block(const Left& a, const bf16* turned, int m, const Matrix& w, int nb, bf16* scratch, float* c) {
  if constexpr (in_strips(F)) {
    if (m > most_dots(F))
      strips_block<F>(turned, m, w, nb, scratch, c);
    else if (w.alike > 1)
      dot_some_strips<F, F == INT4>(a.data, a.height, m, w, nb, scratch, c);
    else
      dot_some_strips<F, false>(a.data, a.height, m, w, nb, scratch, c);
  } else {
    dot_some<F>(a.data, a.height, m, w, nb, c);
  }
  add_rest(w, a, m, nb, c);
}

}  // namespace
