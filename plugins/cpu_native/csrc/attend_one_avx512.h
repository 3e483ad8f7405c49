// See attend_one.h. The softmax, and values times weights, with AVX-512.
#pragma once

#include <algorithm>
#include <cstdint>

#include <immintrin.h>

#include "attend_many.h"
#include "attend_one.h"

namespace {

// As `soften`, for `columns` queries at once. `kept` [COLUMNS] is what is left of each one's sums so far.
inline void soften_columns(float* scores, int n, int, float* best, float* total, float* kept, Ahead& ahead) {
  __m512 top = _mm512_loadu_ps(best);
  const __m512 before = top;
  for (int j = 0; j < n; ++j) top = _mm512_max_ps(top, _mm512_loadu_ps(scores + j * COLUMNS));
  __m512 acc = _mm512_setzero_ps();
  for (int j = 0; j < n; ++j) {
    ahead.ask(1);
    const __m512 e = exp2_512(_mm512_sub_ps(_mm512_loadu_ps(scores + j * COLUMNS), top));
    _mm512_storeu_ps(scores + j * COLUMNS, e);
    acc = _mm512_add_ps(acc, e);
  }
  const __m512 factor = exp2_512(_mm512_sub_ps(before, top));
  _mm512_storeu_ps(kept, factor);
  _mm512_storeu_ps(total, _mm512_fmadd_ps(_mm512_loadu_ps(total), factor, acc));
  _mm512_storeu_ps(best, top);
}

// sums[H heads][dims] += weight * value, for P pairs of 16 dimensions: even ones in one register, odd ones in another.
template <int H, int P>
inline void weigh_some(const bf16* values, size_t stride, const int32_t* slots, int n, const __mmask32* real,
                       const float* weights, float* sums, int dp, int lines, Ahead& ahead) {
  const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
  __m512 acc[H][P][2];
  for (int i = 0; i < H; ++i)
    for (int p = 0; p < P; ++p)
      for (int o = 0; o < 2; ++o) acc[i][p][o] = _mm512_loadu_ps(sums + size_t(i) * dp + p * 32 + o * 16);
  for (int j = 0; j < n; ++j) {
    const bf16* v = values + slots[j] * stride;
    ahead.ask(lines);
    for (int p = 0; p < P; ++p) {
      const __m512i both = _mm512_maskz_loadu_epi16(real[p], v + p * 32);
      const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
      const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(both, upper));
      for (int i = 0; i < H; ++i) {
        const __m512 weight = _mm512_set1_ps(weights[j * COLUMNS + i]);
        acc[i][p][0] = _mm512_fmadd_ps(weight, even, acc[i][p][0]);
        acc[i][p][1] = _mm512_fmadd_ps(weight, odd, acc[i][p][1]);
      }
    }
  }
  for (int i = 0; i < H; ++i)
    for (int p = 0; p < P; ++p)
      for (int o = 0; o < 2; ++o) _mm512_storeu_ps(sums + size_t(i) * dp + p * 32 + o * 16, acc[i][p][o]);
}

template <int P>
inline void weigh_heads(int heads, const bf16* values, size_t stride, const int32_t* slots, int n,
                        const __mmask32* real, const float* weights, float* sums, int dp, int lines, Ahead& ahead) {
  switch (heads) {
    case 1: return weigh_some<1, P>(values, stride, slots, n, real, weights, sums, dp, lines, ahead);
    case 2: return weigh_some<2, P>(values, stride, slots, n, real, weights, sums, dp, lines, ahead);
    case 3: return weigh_some<3, P>(values, stride, slots, n, real, weights, sums, dp, lines, ahead);
    default: return weigh_some<4, P>(values, stride, slots, n, real, weights, sums, dp, lines, ahead);
  }
}

// sums float [g][dp] of one KV head += weights [n][COLUMNS] * its values. Dimensions are in the order of `in_order`.
inline void weigh_values(const bf16* values, size_t stride, const int32_t* slots, int n, int g, int dim, int dp,
                         const float* weights, float* sums, Ahead& ahead) {
  for (int d = 0; d < dp; d += 64) {
    const __mmask32 real[2] = {first_of_32(dim - d), first_of_32(std::max(0, dim - d - 32))};
    for (int i = 0; i < g; i += 4) {
      const int heads = std::min(4, g - i), lines = i == 0;
      float* to = sums + size_t(i) * dp + d;
      if (d + 32 < dp)
        weigh_heads<2>(heads, values + d, stride, slots, n, real, weights + i, to, dp, lines, ahead);
      else
        weigh_heads<1>(heads, values + d, stride, slots, n, real, weights + i, to, dp, lines, ahead);
    }
  }
}

// What `weigh_values` has summed up, dimension by dimension.
inline void in_order(float* sums, int dp) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int d = 0; d < dp; d += 32) {
    const __m512 even = _mm512_loadu_ps(sums + d), odd = _mm512_loadu_ps(sums + d + 16);
    _mm512_storeu_ps(sums + d, _mm512_permutex2var_ps(even, low, odd));
    _mm512_storeu_ps(sums + d + 16, _mm512_permutex2var_ps(even, high, odd));
  }
}

}  // namespace
