// bf16, float16 and float32.
#pragma once

#include <cstdint>
#include <cstring>

#include <immintrin.h>

using bf16 = uint16_t;
using float16 = uint16_t;

namespace {

inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

inline bf16 to_bf16(float f) {  // to nearest even; NaN stays NaN
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return bf16((bits >> 16) | 0x40);
  return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float float_of_16(float16 x) { return _cvtsh_ss(x); }

template <int ROUNDING = _MM_FROUND_TO_NEAREST_INT>
inline float16 to_float16(float x) {
  return float16(_cvtss_sh(x, ROUNDING));
}

// The smallest number that is larger; of the largest one, infinity.
inline float16 next_above(float16 x) {
  if (!(x & 0x8000)) return x + 1;
  return x == 0x8000 ? 1 : x - 1;
}

inline int round_up(int n, int to) { return (n + to - 1) / to * to; }

}  // namespace
