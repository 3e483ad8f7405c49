// See rows.h. As the compiler vectorises plain loops for AVX2.
#pragma once

#include "left.h"
#include "numbers.h"

namespace {

inline float sum_of_squares(const float* x, int n) {
  float sum = 0;
  for (int i = 0; i < n; ++i) sum += x[i] * x[i];
  return sum;
}

// out[i] = x[i] * scale * weight[i]
template <class Out>
inline void scale_row(const float* x, float scale, const float* weight, int n, const Out& out) {
  for (int i = 0; i < n; ++i) store(out.at(i), x[i] * scale * weight[i]);
}

// v[i] *= scale * weight[i]
inline void scale_head(float* v, float scale, const float* weight, int dim) {
  for (int i = 0; i < dim; ++i) v[i] *= scale * weight[i];
}

// The first half of a vector and the second, turned against each other.
inline void rotate(float* v, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; ++i) {
    const float a = v[i], b = v[i + half];
    v[i] = a * cos[i] - b * sin[i];
    v[i + half] = b * cos[i] + a * sin[i];
  }
}

// What attention has found out for a head: to[column + i] = from[i] * by.
inline void scale_to_row(const float* from, float by, int n, const Left::Row& to, int column) {
  for (int i = 0; i < n; ++i) *to.at(column + i) = to_bf16(from[i] * by);
}

// out[16] = silu(sums[16]) * the next 16
inline void gate_silu(const float* sums, bf16* out) {
  for (int i = 0; i < 16; ++i) out[i] = to_bf16(silu(sums[i]) * sums[16 + i]);
}

}  // namespace
