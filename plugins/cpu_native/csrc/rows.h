// The norm, the turning of heads, and activations.
#pragma once

#include <cmath>

#include "instruction_set.h"
#include "left.h"
#include "vectors.h"

namespace {

enum Activation { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3 };

inline float silu(float x) { return x / (1.0f + std::exp(-x)); }

inline float activate(float x, int kind) {
  switch (kind) {
    case SILU: return silu(x);
    case GELU: return 0.5f * x * (1.0f + std::erf(x * 0.70710678f));
    case GELU_TANH: return 0.5f * x * (1.0f + std::tanh(0.79788456f * (x + 0.044715f * x * x * x)));
    default: return x > 0 ? x : 0;
  }
}

// Numbers one after the other as the place of a result, beside Left::Row.
template <class T>
struct Plain {
  T* data;
  T* at(int i) const { return data + i; }
  void zero_from(int) const {}
};

inline void store(float* to, float x) { *to = x; }
inline void store(bf16* to, float x) { *to = to_bf16(x); }

}  // namespace

#ifdef PB_AVX512
#include "rows_avx512.h"
#else
#include "rows_avx2.h"
#endif

namespace {

inline float rms_factor(const float* x, int n, float eps) { return 1.0f / std::sqrt(sum_of_squares(x, n) / n + eps); }

// out[i] = x[i] / rms(x) * weight[i], in a Left::Row or Plain.
template <class Out>
inline void rms_norm(const float* x, const float* weight, int n, float eps, const Out& out) {
  scale_row(x, rms_factor(x, n, eps), weight, n, out);
  out.zero_from(n);
}

// A head's vector: normalised where the model does that, then turned.
inline void turn(float* v, const float* norm, const float* cos, const float* sin, int dim, float eps) {
  if (norm) scale_head(v, rms_factor(v, dim, eps), norm, dim);
  rotate(v, cos, sin, dim / 2);
}

}  // namespace
