// See lanes.h. One register of AVX-512.
#pragma once

#include <cstdint>

#include <immintrin.h>

namespace {

struct Lanes {
  __m512 v;
};

inline Lanes lanes_of(float x) { return {_mm512_set1_ps(x)}; }
inline Lanes lanes_at(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Lanes lanes_of_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
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

}  // namespace
