// See grid.h. With AVX-512.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <immintrin.h>

#include "grid.h"

namespace {

// The numbers of a grid, and what bounds them: float32 [2][16].
struct Bounds {
  __m512 x[2], half[2];
  __m512i bits;  // without the sign of zero
  float lowest, highest;

  explicit Bounds(const bf16* from) {
    bits = _mm512_loadu_si512(from);
    bits = _mm512_mask_mov_epi16(bits, _mm512_cmpeq_epi16_mask(bits, _mm512_set1_epi16(int16_t(0x8000))),
                                 _mm512_setzero_si512());
    const __m256i parts[2] = {_mm512_castsi512_si256(bits), _mm512_extracti64x4_epi64(bits, 1)};
    for (int i = 0; i < 2; ++i) {
      const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(parts[i]), 16);
      x[i] = _mm512_castsi512_ps(wide);
      half[i] = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(wide, _mm512_set1_epi32(0x7f800000))),
                              _mm512_set1_ps(1.0f / 256));
    }
    lowest = _mm512_reduce_min_ps(_mm512_min_ps(x[0], x[1]));
    highest = _mm512_reduce_max_ps(_mm512_max_ps(x[0], x[1]));
  }

  bool are(__m512 low, __m512 high) const {
    return _mm512_cmpneq_epi16_mask((__m512i)_mm512_cvtne2ps_pbh(high, low), bits) == 0;
  }
};

inline void keep_codes(const __m512 (&code)[2], OnGrid& found) {
  for (int i = 0; i < 2; ++i)
    _mm_storeu_si128((__m128i*)(found.code + i * 16), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(code[i])));
}

// With `scale`, exactly on 16 points?
inline bool on_16_with(const Bounds& b, float16 bits, OnGrid& found) {
  const float scale = float_of_16(bits);
  const __m512 by = _mm512_set1_ps(scale), factor = _mm512_set1_ps(scale > 0 ? 1 / scale : 0);
  __m512 code[2], from = _mm512_set1_ps(-INFINITY), to = _mm512_set1_ps(INFINITY);
  for (int i = 0; i < 2; ++i) {
    code[i] = _mm512_roundscale_ps(_mm512_mul_ps(_mm512_sub_ps(b.x[i], _mm512_set1_ps(b.lowest)), factor), 0);
    if (_mm512_cmp_ps_mask(code[i], _mm512_set1_ps(15), _CMP_NLE_UQ)) return false;
    const __m512 at = _mm512_fnmadd_ps(code[i], by, b.x[i]);
    from = _mm512_max_ps(from, _mm512_sub_ps(at, b.half[i]));
    to = _mm512_min_ps(to, _mm512_add_ps(at, b.half[i]));
  }
  // A little more, since these bounds are rounded too: what counts is the trial.
  const float slack = 1e-6f * std::max(std::fabs(b.lowest), std::fabs(b.highest));
  const float first = _mm512_reduce_max_ps(from) - slack, last = _mm512_reduce_min_ps(to) + slack;
  if (!(first <= last) || std::fabs(first) > 65000) return false;
  float16 least = to_float16<_MM_FROUND_TO_NEG_INF>(first);
  for (int tries = 0; tries < 64 && float_of_16(least) <= last; ++tries, least = next_above(least)) {
    const __m512 start = _mm512_set1_ps(float_of_16(least));
    if (!b.are(_mm512_fmadd_ps(code[0], by, start), _mm512_fmadd_ps(code[1], by, start))) continue;
    found.scale = bits, found.least = least;
    keep_codes(code, found);
    return true;
  }
  return false;
}

// Exactly on 16 points, the lowest number on the first of them.
inline bool on_16(const bf16* x, OnGrid& found) {
  const Bounds b(x);
  const float range = b.highest - b.lowest, slack = half_step(b.lowest) + half_step(b.highest);
  if (!(range + slack < 65000)) return false;
  for (int spaces = 15; spaces; --spaces) {
    const int from = to_float16<_MM_FROUND_TO_NEG_INF>(std::max(0.0f, range - slack) / spaces);
    const int to = to_float16<_MM_FROUND_TO_POS_INF>((range + slack) / spaces), middle = (from + to) / 2;
    for (int away = 0; middle - away >= from || middle + away <= to; ++away)
      if ((middle - away >= from && on_16_with(b, float16(middle - away), found)) ||
          (away && middle + away <= to && on_16_with(b, float16(middle + away), found)))
        return true;
  }
  return false;
}

// Exactly on 255 points around zero, the largest number on the last of them.
inline bool on_255(const bf16* x, OnGrid& found) {
  const Bounds b(x);
  const float most = std::max(b.highest, -b.lowest), slack = half_step(most);
  if (!(most + slack < 65000)) return false;
  const int from = to_float16<_MM_FROUND_TO_NEG_INF>((most - slack) / 127),
            to = to_float16<_MM_FROUND_TO_POS_INF>((most + slack) / 127);
  for (int bits = from; bits <= to; ++bits) {
    const float scale = float_of_16(float16(bits));
    const __m512 by = _mm512_set1_ps(scale), factor = _mm512_set1_ps(scale > 0 ? 1 / scale : 0);
    const __m512 code[2] = {_mm512_roundscale_ps(_mm512_mul_ps(b.x[0], factor), 0),
                            _mm512_roundscale_ps(_mm512_mul_ps(b.x[1], factor), 0)};
    const __m512 most_code = _mm512_max_ps(_mm512_abs_ps(code[0]), _mm512_abs_ps(code[1]));
    if (_mm512_cmp_ps_mask(most_code, _mm512_set1_ps(127), _CMP_NLE_UQ)) continue;
    if (!b.are(_mm512_mul_ps(code[0], by), _mm512_mul_ps(code[1], by))) continue;
    found.scale = float16(bits), found.least = 0;
    keep_codes(code, found);
    return true;
  }
  return false;
}

}  // namespace
