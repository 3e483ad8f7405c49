// Operations on rows of float32, as the compiler vectorises plain loops for AVX2.
#pragma once

#include <cmath>
#include <cstdint>

#include "numbers.h"

namespace {

// Whether there is BF12, and grids are looked for: both take AVX-512.
constexpr bool ALL_FORMATS = false;

inline void floats_to_bf16(const float* from, bf16* to, int n) {
  for (int i = 0; i < n; ++i) to[i] = to_bf16(from[i]);
}

// to[i] = from[i] * by
inline void scale_to_bf16(const float* from, float by, bf16* to, int n) {
  for (int i = 0; i < n; ++i) to[i] = to_bf16(from[i] * by);
}

}  // namespace
