// Sixteen lanes of float32 or of int32: one AVX-512 register or two of AVX2, with the same operations in the same
// order, so that every instruction set samples the same tokens.
#pragma once

#include <cmath>
#include <cstdint>

#include "instruction_set.h"
#include "vectors.h"

namespace {

constexpr int LANES = 16;

}  // namespace

#ifdef PB_AVX512
#include "lanes_avx512.h"
#else
#include "lanes_avx2.h"
#endif

namespace {

inline float total(Lanes a) {
  const __m256 eight = halves_joined(a, true);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline float largest(Lanes a) {
  const __m256 eight = halves_joined(a, false);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// The first `left` numbers, at most 16, and `rest` behind them. Reads no further than them.
inline Lanes first_at(const float* p, int left, float rest) {
  if (left >= LANES) return lanes_at(p);
  alignas(64) float part[LANES];
  for (int i = 0; i < LANES; ++i) part[i] = i < left ? p[i] : rest;
  return lanes_at(part);
}

// 2^t for t <= 0, relative error below 2e-7; exactly 1 for 0, and exactly 0 below -126, for -inf and for NaN.
inline Lanes power_of_two(Lanes t) {
  const uint32_t counts = at_least(t, lanes_of(-126.0f));
  t = only(counts, t);
  const Lanes whole = rounded(t), f = t - whole;
  Lanes y = lanes_of(1.535336188e-4f);
  y = fused(y, f, lanes_of(1.339887440e-3f));
  y = fused(y, f, lanes_of(9.618437357e-3f));
  y = fused(y, f, lanes_of(5.550332548e-2f));
  y = fused(y, f, lanes_of(2.402264689e-1f));
  y = fused(y, f, lanes_of(6.931472028e-1f));
  y = fused(y, f, lanes_of(1.0f));
  return only(counts, scaled(y, whole));
}

}  // namespace
