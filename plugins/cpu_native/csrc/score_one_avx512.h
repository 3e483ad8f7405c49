// See attend_one.h. Scores by dot products of AVX-512.
#pragma once

#include <algorithm>
#include <cstdint>

#include <immintrin.h>

#include "attend_many.h"
#include "attend_one.h"
#include "dots_avx512.h"

namespace {

// Queries of `count` columns as `score_one` reads them, to q: `give(c, to)` writes column c's, bf16 [dp].
template <class Give>
inline void lay_out_queries(int count, int, int, int dp, bf16* q, Buffer<bf16>&, Give&& give) {
  for (int c = 0; c < count; ++c) give(c, q + size_t(c) * dp);
}

// scores [n up to a multiple of 16][COLUMNS] of `heads` KV heads' queries with n keys, the first of them `at[0]`'s.
inline void score_one(const HeadKeys& keys, const int32_t* at, int n, int heads, const bf16* q, float* scores,
                      Buffer<bf16>&, Ahead& ahead) {
  const auto& [first, stride, dim, dp, g] = keys;
  const int columns = heads * g, lines = BITE * ahead.lines_of_slot() / (3 * columns) + 1;
  for (int j = 0; j < n; j += 16) {
    const bf16* rows[16];
    for (int i = 0; i < 16; ++i) rows[i] = first + at[std::min(j + i, n - 1)] * stride;
    __m512i turned[COLUMNS];
    for (int c = 0; c < columns; ++c) {
      const bf16* head = q + size_t(c) * dp;
      const ptrdiff_t offset = c / g * dim;
      ahead.ask(lines);
      __m512 sums[16];
      for (auto& one : sums) one = _mm512_setzero_ps();
      for (int d = 0; d < dp; d += 32) {
        const __mmask32 real = first_of_32(dim - d);
        const __m512bh query = (__m512bh)_mm512_loadu_si512(head + d);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i)
          sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)_mm512_maskz_loadu_epi16(real, rows[i] + offset + d), query);
      }
      turned[c] = _mm512_castps_si512(sums_of(sums));
    }
    for (int c = columns; c < COLUMNS; ++c) turned[c] = _mm512_setzero_si512();
    transpose16(turned);
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(scores + (j + i) * COLUMNS, turned[i]);
  }
}

}  // namespace
