// Unpacking packed weights with AVX2: bytes in plain loops, 4 bits by looking up 16 points.
#pragma once

#include <cstdint>
#include <cstring>

#include <immintrin.h>

#include "matrix.h"

namespace {

// See Cursor. Weights that are neither plain nor in strips do not occur.
template <Format F, class Fn>
void unpack_step(const Matrix& w, const uint8_t* p, bf16* to, Fn&& between);

// Of a strip's step of 4 bits, in float32: 16 scales and 16 least numbers.
template <Format F>
inline void grids(const uint8_t* p, float* to) {
  static_assert(in_nibbles(F));
  const uint8_t* from = p + code_bytes(F);
  for (int i = 0; i < STRIP; i += 8) {
    if constexpr (F == INT4) {
      const __m256i words = _mm256_loadu_si256((const __m256i*)(from + i * 4)), low = _mm256_set1_epi32(ZERO_BITS);
      const __m256 scales = _mm256_castsi256_ps(_mm256_andnot_si256(low, words));
      const __m256 zeros = _mm256_cvtepi32_ps(_mm256_and_si256(words, low));
      _mm256_storeu_ps(to + i, scales);
      _mm256_storeu_ps(to + STRIP + i, _mm256_fnmadd_ps(zeros, scales, _mm256_setzero_ps()));
    } else {
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i * 2))));
      _mm256_storeu_ps(to + STRIP + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + (STRIP + i) * 2))));
    }
  }
}

// Rounded to bf16, in the lower halves. All are finite.
inline __m256i rounded_to_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x),
                odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
}

// The 16 numbers that a row's codes stand for: their lower and their upper bytes, each in both halves of a register.
struct Points {
  __m256i lower, upper;

  Points(float scale, float least) {
    const __m256 by = _mm256_set1_ps(scale), from = _mm256_set1_ps(least);
    const __m256i first = rounded_to_bf16(_mm256_fmadd_ps(_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), by, from));
    const __m256i second = rounded_to_bf16(_mm256_fmadd_ps(_mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15), by, from));
    const __m256i all = _mm256_packus_epi32(first, second);  // 0 to 3, 8 to 11; 4 to 7, 12 to 15
    const __m256i bytes =
        _mm256_packus_epi16(_mm256_and_si256(all, _mm256_set1_epi16(0xff)), _mm256_srli_epi16(all, 8));
    // Words of four bytes: lower 0, 8, upper 0, 8; lower 4, 12, upper 4, 12.
    lower = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5));
    upper = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(2, 6, 3, 7, 2, 6, 3, 7));
  }

  // bf16 [16] of codes in the lowest four bits of 16 numbers.
  __m256i of(__m256i codes) const {
    codes = _mm256_and_si256(codes, _mm256_set1_epi16(15));
    const __m256i low = _mm256_shuffle_epi8(lower, _mm256_or_si256(codes, _mm256_set1_epi16(short(0x8000))));
    const __m256i high =
        _mm256_shuffle_epi8(upper, _mm256_or_si256(_mm256_slli_epi16(codes, 8), _mm256_set1_epi16(0x80)));
    return _mm256_or_si256(low, high);
  }
};

// Row `r` of a strip's step of 4 bits, bf16 [32]. `grid` is what `grids` has made of the step.
inline void row_of_nibbles(const uint8_t* p, const float* grid, int r, __m256i (&row)[2]) {
  const Points points(grid[r], grid[STRIP + r]);
  const __m128i shift = _mm_cvtsi32_si128(r % 4 * 4);
  for (int i = 0; i < 2; ++i)
    row[i] = points.of(_mm256_srl_epi16(_mm256_loadu_si256((const __m256i*)(p + r / 4 * 64 + i * 32)), shift));
}

// See Cursor. A strip's step, the first row of which is row `first` of the block.
template <Format F, class Fn>
inline void unpack_strip(const uint8_t* p, int first, bf16* to, Fn&& between) {
  static_assert(in_strips(F), "the others take AVX-512");
  alignas(32) float grid[STRIP * 2];
  if constexpr (in_nibbles(F)) grids<F>(p, grid);
  const float16* scales = reinterpret_cast<const float16*>(p + code_bytes(F));
  for (int r = 0; r < STRIP; ++r) {
    alignas(32) bf16 row[KB];
    if constexpr (in_nibbles(F)) {
      __m256i parts[2];
      row_of_nibbles(p, grid, r, parts);
      for (int i = 0; i < 2; ++i) _mm256_store_si256((__m256i*)(row + i * 16), parts[i]);
    } else {
      const float scale = float_of_16(scales[r]);
      for (int i = 0; i < KB; ++i) row[i] = to_bf16(reinterpret_cast<const int8_t*>(p)[r * KB + i] * scale);
    }
    for (int i = 0; i < KB; i += 2) memcpy(to + place(r, i), row + i, 4);
    between(first + r);
  }
}

}  // namespace
