// See lanes.h. Two registers of AVX2.
#pragma once

#include <cstdint>

#include <immintrin.h>

namespace {

struct Lanes {
  __m256 low, high;
};

inline Lanes lanes_of(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Lanes lanes_at(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256 half_of_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline Lanes lanes_of_bf16(const uint16_t* p) { return {half_of_bf16(p), half_of_bf16(p + 8)}; }
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

}  // namespace
