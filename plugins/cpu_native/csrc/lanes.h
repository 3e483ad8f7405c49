// Sixteen lanes of float32 or of int32: one AVX-512 register or two of AVX2, with the same operations in the same
// order, so that every instruction set samples the same tokens.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include <immintrin.h>

#include "numbers.h"

namespace {

constexpr int LANES = 16;

#ifdef PB_AVX512

struct Lanes {
  __m512 v;
};

inline Lanes lanes_of(float x) { return {_mm512_set1_ps(x)}; }
inline Lanes lanes_at(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes larger(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Lanes fused(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes rounded(Lanes a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline uint32_t unordered(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q); }
inline uint32_t at_least(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
inline uint32_t above(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
inline Lanes only(uint32_t mask, Lanes a) { return {_mm512_maskz_mov_ps(__mmask16(mask), a.v)}; }
inline Lanes chosen(uint32_t mask, Lanes yes, Lanes no) { return {_mm512_mask_mov_ps(no.v, __mmask16(mask), yes.v)}; }
inline void store(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }

// a * 2^whole, for whole from -126 to 0.
inline Lanes scaled(Lanes a, Lanes whole) { return {_mm512_scalef_ps(a.v, whole.v)}; }

struct Words {
  __m512i v;
};

inline Words words_of(uint32_t x) { return {_mm512_set1_epi32(int(x))}; }
inline Words words_at(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
inline Words operator+(Words a, Words b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Words operator*(Words a, Words b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline Words operator^(Words a, Words b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int BY>
Words shifted(Words a) {
  return {_mm512_srli_epi32(a.v, BY)};
}
// As signed numbers.
inline Words larger(Words a, Words b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline uint32_t above(Words a, Words b) { return _mm512_cmpgt_epi32_mask(a.v, b.v); }

inline __m256 halves_joined(Lanes a, bool add) {
  const __m256 low = _mm512_castps512_ps256(a.v), high = _mm512_extractf32x8_ps(a.v, 1);
  return add ? _mm256_add_ps(low, high) : _mm256_max_ps(low, high);
}

#else

struct Lanes {
  __m256 low, high;
};

inline Lanes lanes_of(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Lanes lanes_at(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Lanes operator+(Lanes a, Lanes b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Lanes larger(Lanes a, Lanes b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Lanes fused(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Lanes rounded(Lanes a) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.low, nearest), _mm256_round_ps(a.high, nearest)};
}
inline uint32_t bits_of(__m256 low, __m256 high) {
  return uint32_t(_mm256_movemask_ps(low)) | uint32_t(_mm256_movemask_ps(high)) << 8;
}
inline uint32_t unordered(Lanes a, Lanes b) {
  return bits_of(_mm256_cmp_ps(a.low, b.low, _CMP_UNORD_Q), _mm256_cmp_ps(a.high, b.high, _CMP_UNORD_Q));
}
inline uint32_t at_least(Lanes a, Lanes b) {
  return bits_of(_mm256_cmp_ps(a.low, b.low, _CMP_GE_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_GE_OQ));
}
inline uint32_t above(Lanes a, Lanes b) {
  return bits_of(_mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ));
}
inline __m256 half_mask(uint32_t bits) {
  const __m256i one = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(bits)), one), one));
}
inline Lanes only(uint32_t mask, Lanes a) {
  return {_mm256_and_ps(half_mask(mask), a.low), _mm256_and_ps(half_mask(mask >> 8), a.high)};
}
inline Lanes chosen(uint32_t mask, Lanes yes, Lanes no) {
  return {_mm256_blendv_ps(no.low, yes.low, half_mask(mask)),
          _mm256_blendv_ps(no.high, yes.high, half_mask(mask >> 8))};
}
inline void store(float* p, Lanes a) {
  _mm256_storeu_ps(p, a.low);
  _mm256_storeu_ps(p + 8, a.high);
}
inline __m256 scaled(__m256 a, __m256 whole) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
  return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
inline Lanes scaled(Lanes a, Lanes whole) { return {scaled(a.low, whole.low), scaled(a.high, whole.high)}; }
struct Words {
  __m256i low, high;
};

inline Words words_of(uint32_t x) { return {_mm256_set1_epi32(int(x)), _mm256_set1_epi32(int(x))}; }
inline Words words_at(const uint32_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
inline Words operator+(Words a, Words b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
inline Words operator*(Words a, Words b) {
  return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)};
}
inline Words operator^(Words a, Words b) { return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)}; }
template <int BY>
Words shifted(Words a) {
  return {_mm256_srli_epi32(a.low, BY), _mm256_srli_epi32(a.high, BY)};
}
// As signed numbers.
inline Words larger(Words a, Words b) { return {_mm256_max_epi32(a.low, b.low), _mm256_max_epi32(a.high, b.high)}; }
inline uint32_t above(Words a, Words b) {
  return bits_of(_mm256_castsi256_ps(_mm256_cmpgt_epi32(a.low, b.low)),
                 _mm256_castsi256_ps(_mm256_cmpgt_epi32(a.high, b.high)));
}

inline __m256 halves_joined(Lanes a, bool add) {
  return add ? _mm256_add_ps(a.low, a.high) : _mm256_max_ps(a.low, a.high);
}

#endif

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
