// Operations on rows of float32, with AVX-512. What is not a multiple of 16 ends in plain loops.
#pragma once

#include <cmath>
#include <cstdint>

#include <immintrin.h>

#include "numbers.h"

namespace {

// Whether there is BF12, and grids are looked for.
constexpr bool ALL_FORMATS = true;

// Transposes 16 rows of 16 numbers of 32 bits.
inline void transpose16(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

// e^x for x <= 87, by a polynomial of 2^f (relative error below 2e-7, which float32 and bf16 weights do not see).
inline __m512 exp512(__m512 x) {
  const __m512 t = _mm512_mul_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.3f)), _mm512_set1_ps(1.44269504f));
  const __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(t, whole);
  __m512 y = _mm512_set1_ps(1.535336188e-4f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.339887440e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.618437357e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.550332548e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.402264689e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.931472028e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, whole);
}

// x / (1 + e^-x). The reciprocal is refined once: its error is far below what bf16 sees.
inline __m512 silu512(__m512 x) {
  // Beyond +-80 nothing changes any more, and e^80 is finite.
  const __m512 e = exp512(_mm512_min_ps(_mm512_sub_ps(_mm512_setzero_ps(), x), _mm512_set1_ps(80.0f)));
  const __m512 d = _mm512_add_ps(_mm512_set1_ps(1.0f), e);
  const __m512 r = _mm512_rcp14_ps(d);
  return _mm512_mul_ps(x, _mm512_mul_ps(r, _mm512_fnmadd_ps(d, r, _mm512_set1_ps(2.0f))));
}

inline __m512 load(const float* from) { return _mm512_loadu_ps(from); }

// Sixteen numbers to memory: as they are, or rounded.
inline void store16(float* to, __m512 x) { _mm512_storeu_ps(to, x); }
inline void store16(bf16* to, __m512 x) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(x)); }

inline void floats_to_bf16(const float* from, bf16* to, int n) {
  int i = 0;
  for (; i + 16 <= n; i += 16) store16(to + i, _mm512_loadu_ps(from + i));
  for (; i < n; ++i) to[i] = to_bf16(from[i]);
}

// to[i] = from[i] * by
inline void scale_to_bf16(const float* from, float by, bf16* to, int n) {
  int i = 0;
  const __m512 factor = _mm512_set1_ps(by);
  for (; i + 16 <= n; i += 16) store16(to + i, _mm512_mul_ps(_mm512_loadu_ps(from + i), factor));
  for (; i < n; ++i) to[i] = to_bf16(from[i] * by);
}

}  // namespace
