// See few_rows.h. As many rows as there are, like other blocks; a few with weights of 4 bits by dot products.
#pragma once

#include <cstdint>

#include <immintrin.h>

#include "blocks.h"
#include "few_rows.h"

namespace {

// How many rows are multiplied by dot products.
constexpr int most_dots(Format f) { return in_nibbles(f) ? 4 : 0; }

// Of 32 numbers bf16, those at even places and then those at odd ones, each in two registers of float32.
inline void split(const __m256i (&row)[2], __m256 (&to)[4]) {
  for (int i = 0; i < 2; ++i) {
    to[i] = _mm256_castsi256_ps(_mm256_slli_epi32(row[i], 16));
    to[2 + i] = _mm256_castsi256_ps(_mm256_and_si256(row[i], _mm256_set1_epi32(int(0xffff0000))));
  }
}

// For dot products: the rows of a `split`, float32 [steps][m][32]. Other blocks need nothing of the kind.
template <Format F>
inline const bf16* right_side(const Left& a, int m, int steps, Buffer<bf16>& space) {
  if (m > most_dots(F)) return nullptr;
  float* to = reinterpret_cast<float*>(space.need(size_t(steps) * m * KB * 2));
  for (int s = 0; s < steps; ++s)
    for (int i = 0; i < m; ++i, to += KB) {
      const __m256i* from = (const __m256i*)(a.row(i).at(s * KB));
      __m256 parts[4];
      split({_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)}, parts);
      for (int j = 0; j < 4; ++j) _mm256_storeu_ps(to + j * 8, parts[j]);
    }
  return space.data;
}

inline float sum_of(__m256 x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// c[M][NB] of weights of 4 bits and what `right_side` has made of M rows: R rows of a strip at a time, over all steps.
// `space` holds the scales of a strip.
template <Format F, int M, int R>
inline void dot_strips(const float* a, const Matrix& w, int nb, float* space, float* c) {
  const int steps = w.steps();
  for (int half = 0; half < 2; ++half) {
    const uint8_t* strip = w.strip(nb, half);
    for (int s = 0; s < steps; ++s) grids<F>(strip + s * strip_bytes(F), space + s * STRIP * 2);
    for (int first = 0; first < STRIP; first += R) {
      __m256 sums[R][M];
      for (auto& row : sums)
        for (auto& one : row) one = _mm256_setzero_ps();
      const uint8_t* p = strip;
      const float *left = a, *grid = space;
      for (int s = 0; s < steps; ++s, p += strip_bytes(F), left += M * KB, grid += STRIP * 2) {
        for (int i = 0; i < R; ++i) {
          __m256i row[2];
          __m256 weights[4];
          row_of_nibbles(p, grid, first + i, row);
          split(row, weights);
          for (int j = 0; j < M; ++j)
            for (int part = 0; part < 4; ++part)
              sums[i][j] = _mm256_fmadd_ps(weights[part], _mm256_loadu_ps(left + j * KB + part * 8), sums[i][j]);
        }
      }
      for (int i = 0; i < R; ++i)
        for (int j = 0; j < M; ++j) c[j * NB + half * STRIP + first + i] = sum_of(sums[i][j]);
    }
  }
}

template <Format F>
inline void dot_some_strips(const float* a, int m, const Matrix& w, int nb, float* space, float* c) {
  switch (m) {
    case 1: return dot_strips<F, 1, 4>(a, w, nb, space, c);
    case 2: return dot_strips<F, 2, 4>(a, w, nb, space, c);
    case 3: return dot_strips<F, 3, 2>(a, w, nb, space, c);
    default: return dot_strips<F, 4, 2>(a, w, nb, space, c);
  }
}

// c[m][NB] = a[m, k] * (block nb of w)^T for m <= 32. `right` is what `right_side` made of a; `scratch` holds an
// unpacked block.
template <Format F>
inline void block(const Left& a, const bf16* right, int m, const Matrix& w, int nb, bf16* scratch, float* c) {
  if constexpr (F == BF16) {
    tile_block(a.data, a.height, m, reinterpret_cast<const bf16*>(w.block(nb)), w.steps(), c, false, [] {});
  } else {
    if constexpr (in_nibbles(F))
      if (m > 0 && m <= most_dots(F)) {
        dot_some_strips<F>(reinterpret_cast<const float*>(right), m, w, nb, reinterpret_cast<float*>(scratch), c);
        return add_rest(w, a, m, nb, c);
      }
    Cursor<F> from(w, nb);
    packed_block<F, false>(a.data, a.height, m, from, w.steps(), scratch, c, false, [] {});
  }
}

}  // namespace
