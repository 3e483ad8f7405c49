// See attend_many.h. Packing keys and values, and the softmax, with AVX-512.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <immintrin.h>

#include "attend_many.h"
#include "vectors_avx512.h"

namespace {

// 2^x for x <= 0, relative error below 3e-6; exactly 0 for -inf, and 0 or next to it below -126.
inline __m512 exp2_512(__m512 x) {
  // Adding 1.5 * 2^23 rounds to a whole number, which then stands in the lowest bits, ready for the exponent's.
  const __m512 magic = _mm512_set1_ps(12582912.0f);
  x = _mm512_max_ps(x, _mm512_set1_ps(-127.0f));
  const __m512 t = _mm512_add_ps(x, magic), f = _mm512_sub_ps(x, _mm512_sub_ps(t, magic));
  __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(9.582853220e-3f), f, _mm512_set1_ps(5.590642621e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.402409862e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.931241932e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), _mm512_slli_epi32(_mm512_castps_si512(t), 23)));
}

// The first `n` of 32 numbers are there.
inline __mmask32 first_of_32(int n) { return n >= 32 ? ~__mmask32(0) : (__mmask32(1) << n) - 1; }

inline void pack_keys(const bf16* keys, size_t stride, const int32_t* slots, int n, int dim, bf16* tiles) {
  const int dp = round_up(dim, 32);
  for (int j = 0; j < round_up(n, 32); j += 16)
    for (int d = 0; d < dp; d += 32, tiles += 512) {
      const __mmask32 real = first_of_32(dim - d);
      __m512i rows[16];
      for (int i = 0; i < 16; ++i)
        rows[i] = j + i < n ? _mm512_maskz_loadu_epi16(real, keys + slots[j + i] * stride + d) : _mm512_setzero_si512();
      transpose16(rows);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(tiles + i * 32, rows[i]);
    }
}

inline void pack_values(const bf16* values, size_t stride, const int32_t* slots, int n, int dim, bf16* tiles) {
  const int dp = round_up(dim, 32);
  for (int j = 0; j < n; j += 32, tiles += 32 * dp)
    for (int p = 0; p < 16; ++p) {
      const int at = j + p * 2;
      const bf16* even = at < n ? values + slots[at] * stride : nullptr;
      const bf16* odd = at + 1 < n ? values + slots[at + 1] * stride : nullptr;
      for (int d = 0; d < dp; d += 16) {
        bf16* to = tiles + d / 16 * 512 + p * 32;
        const __mmask16 real = __mmask16(first_of_32(std::max(0, std::min(16, dim - d))));
        const __m512i low =
            even ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(real, even + d)) : _mm512_setzero_si512();
        const __m512i high =
            odd ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(real, odd + d)) : _mm512_setzero_si512();
        _mm512_store_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
      }
    }
}

// Scores [from, to) of up to 32 queries become weights relative to each one's largest score so far; what has been
// summed up under a smaller one shrinks. All largest scores first, then all weights: there is no waiting for one
// query's.
inline void soften(float* scores, int rows, int from, int to, int dp, bf16* weights, float* best, float* total,
                   float* sums) {
  alignas(64) float peak[32], kept[32];
  for (int i = 0; i < rows; ++i) {
    const float* row = scores + i * KEYS;
    __m512 top = _mm512_loadu_ps(row + from), other = _mm512_loadu_ps(row + from + 16);
    for (int j = from + 32; j < to; j += 32) {
      top = _mm512_max_ps(top, _mm512_loadu_ps(row + j));
      other = _mm512_max_ps(other, _mm512_loadu_ps(row + j + 16));
    }
    peak[i] = _mm512_reduce_max_ps(_mm512_max_ps(top, other));
  }
  for (int i = rows; i < round_up(rows, 16); ++i) peak[i] = -INFINITY;
  bool changed = false;
  for (int i = 0; i < rows; i += 16) {
    const __m512 before = _mm512_loadu_ps(best + i), now = _mm512_max_ps(before, _mm512_load_ps(peak + i));
    // Nothing to see so far: scores of -inf, less nothing, and weights of 0.
    const __mmask16 nothing = _mm512_cmp_ps_mask(now, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
    const __m512 factor = exp2_512(_mm512_sub_ps(before, now));
    changed |= _mm512_cmp_ps_mask(before, now, _CMP_NEQ_UQ) != 0;
    _mm512_storeu_ps(best + i, now);
    _mm512_store_ps(peak + i, _mm512_mask_mov_ps(now, nothing, _mm512_setzero_ps()));
    _mm512_store_ps(kept + i, factor);
    _mm512_storeu_ps(total + i, _mm512_mul_ps(_mm512_loadu_ps(total + i), factor));
  }
  for (int i = 0; i < rows; ++i) {
    const float* row = scores + i * KEYS;
    bf16* to_row = weights + i * KEYS;
    const __m512 shift = _mm512_set1_ps(peak[i]);
    __m512 acc = _mm512_setzero_ps(), other = acc;
    for (int j = from; j < to; j += 32) {
      const __m512 low = exp2_512(_mm512_sub_ps(_mm512_loadu_ps(row + j), shift));
      const __m512 high = exp2_512(_mm512_sub_ps(_mm512_loadu_ps(row + j + 16), shift));
      acc = _mm512_add_ps(acc, low);
      other = _mm512_add_ps(other, high);
      _mm512_storeu_si512(to_row + j, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
    total[i] += _mm512_reduce_add_ps(_mm512_add_ps(acc, other));
  }
  if (changed)
    for (int i = 0; i < rows; ++i) {
      const __m512 factor = _mm512_set1_ps(kept[i]);
      float* sum = sums + size_t(i) * dp;
      for (int d = 0; d < dp; d += 16) _mm512_storeu_ps(sum + d, _mm512_mul_ps(_mm512_loadu_ps(sum + d), factor));
    }
}

}  // namespace
