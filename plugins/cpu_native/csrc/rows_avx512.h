// See rows.h. With AVX-512.
#pragma once

#include <immintrin.h>

#include "left.h"
#include "vectors_avx512.h"

namespace {

inline float sum_of_squares(const float* x, int n) {
  int i = 0;
  __m512 acc = _mm512_setzero_ps();
  for (; i + 16 <= n; i += 16) {
    const __m512 v = _mm512_loadu_ps(x + i);
    acc = _mm512_fmadd_ps(v, v, acc);
  }
  float sum = _mm512_reduce_add_ps(acc);
  for (; i < n; ++i) sum += x[i] * x[i];
  return sum;
}

// out[i] = x[i] * scale * weight[i]
template <class Out>
inline void scale_row(const float* x, float scale, const float* weight, int n, const Out& out) {
  int i = 0;
  const __m512 factor = _mm512_set1_ps(scale);
  for (; i + 16 <= n; i += 16)
    store16(out.at(i), _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), factor), _mm512_loadu_ps(weight + i)));
  for (; i < n; ++i) store(out.at(i), x[i] * scale * weight[i]);
}

// v[i] *= scale * weight[i]
inline void scale_head(float* v, float scale, const float* weight, int dim) {
  int i = 0;
  const __m512 factor = _mm512_set1_ps(scale);
  for (; i + 16 <= dim; i += 16)
    _mm512_storeu_ps(v + i, _mm512_mul_ps(_mm512_loadu_ps(v + i), _mm512_mul_ps(factor, _mm512_loadu_ps(weight + i))));
  for (; i < dim; ++i) v[i] *= scale * weight[i];
}

// The first half of a vector and the second, turned against each other.
inline void rotate(float* v, const float* cos, const float* sin, int half) {
  int i = 0;
  for (; i + 16 <= half; i += 16) {
    const __m512 a = _mm512_loadu_ps(v + i), b = _mm512_loadu_ps(v + i + half);
    const __m512 c = _mm512_loadu_ps(cos + i), s = _mm512_loadu_ps(sin + i);
    _mm512_storeu_ps(v + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
    _mm512_storeu_ps(v + i + half, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
  }
  for (; i < half; ++i) {
    const float a = v[i], b = v[i + half];
    v[i] = a * cos[i] - b * sin[i];
    v[i + half] = b * cos[i] + a * sin[i];
  }
}

// What attention has found out for a head: to[column + i] = from[i] * by.
inline void scale_to_row(const float* from, float by, int n, const Left::Row& to, int column) {
  int i = 0;
  const __m512 factor = _mm512_set1_ps(by);
  for (; n % 16 == 0 && i < n; i += 16) store16(to.at(column + i), _mm512_mul_ps(_mm512_loadu_ps(from + i), factor));
  for (; i < n; ++i) *to.at(column + i) = to_bf16(from[i] * by);
}

// out[16] = silu(sums[16]) * the next 16
inline void gate_silu(const float* sums, bf16* out) {
  store16(out, _mm512_mul_ps(silu512(_mm512_loadu_ps(sums)), _mm512_loadu_ps(sums + 16)));
}

}  // namespace
