// Dot products with AVX-512, straight from packed weights, and what turns sides of a product.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include <immintrin.h>

#include "left.h"
#include "memory.h"
#include "unpack.h"

namespace {

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

// Up to 32 rows as the right side of a product whose left side is weights: for every step a tile or two of 16 pairs of
// columns x 16 rows x 2.
inline void turn_left(const Left& a, int m, int steps, bf16* to) {
  for (int s = 0; s < steps; ++s)
    for (int r = 0; r < m; r += 16, to += 512) {
      __m512i rows[16];
      for (int i = 0; i < 16; ++i)
        rows[i] = r + i < m ? _mm512_loadu_si512(a.data + (size_t(s) * a.height + r + i) * KB) : _mm512_setzero_si512();
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

// What `turn_left` makes of a, in `space`.
inline const bf16* turned(const Left& a, int m, int steps, Buffer<bf16>& space) {
  bf16* to = space.need(size_t(steps) * 1024);
  turn_left(a, m, steps, to);
  return to;
}

}  // namespace
