// See attend_one.h. Scores with AMX tiles.
#pragma once

#include <cstdint>
#include <cstring>

#include <immintrin.h>

#include "attend_many.h"
#include "attend_one.h"
#include "tiles_amx.h"

namespace {

// Queries of `count` columns as `score_one` reads them, to q: `give(c, to)` writes column c's, bf16 [dp].
template <class Give>
inline void lay_out_queries(int count, int heads, int g, int dp, bf16* q, Buffer<bf16>& spare, Give&& give) {
  // Right side: a step of 32 dimensions belongs to one KV head, and has zeros in the columns of the others.
  memset(q, 0, sizeof(bf16) * heads * dp * COLUMNS);
  bf16* row = spare.need(size_t(dp));
  for (int c = 0; c < count; ++c) {
    give(c, row);
    bf16* right = q + size_t(c / g) * dp * COLUMNS;
    for (int d = 0; d < dp; d += 2) memcpy(right + (d / 2 * COLUMNS + c) * 2, row + d, 4);
  }
}

// scores [n up to a multiple of 16][COLUMNS] of `heads` KV heads' queries with n keys, the first of them `at[0]`'s.
// `spare` is memory for a copy of keys.
inline void score_one(const HeadKeys& keys, const int32_t* at, int n, int heads, const bf16* q, float* scores,
                      Buffer<bf16>& spare, Ahead& ahead) {
  const auto& [first, stride, dim, dp, g] = keys;
  const int steps = dp / 32;
  set_tiles(16, 16);
  for (int j = 0; j < n; j += 16) {
    const bf16* left = first + at[j] * stride;
    // Slots that follow each other in equal steps (a prompt's, or those of a batch that decodes) are a tile as they
    // are.
    const int64_t step = n - j > 1 ? at[j + 1] - at[j] : 0;
    bool even = n - j >= 16 && dim == dp;
    for (int i = 2; even && i < 16; ++i) even = at[j + i] - at[j + i - 1] == step;
    ptrdiff_t ld = ptrdiff_t(step * int64_t(stride) * 2);
    if (!even) {
      bf16* copy = spare.need(size_t(16) * COLUMNS * dp);
      ld = ptrdiff_t(heads) * dp * 2;
      for (int i = 0; i < 16; ++i)
        for (int h = 0; h < heads; ++h) {
          bf16* to = copy + (size_t(i) * heads + h) * dp;
          for (int d = 0; d < dp; d += 32)
            _mm512_storeu_si512(to + d, j + i < n ? _mm512_maskz_loadu_epi16(first_of_32(dim - d),
                                                                             first + at[j + i] * stride + h * dim + d)
                                                  : _mm512_setzero_si512());
        }
      left = copy;
    }
    _tile_zero(0);
    for (int s = 0; s < heads * steps; ++s) {
      ahead.ask(5);  // as many steps as a slot has lines, for 16 slots: a third of them
      _tile_loadd(4, left + s * 32, ld);
      _tile_loadd(6, q + s * 512, 64);
      _tile_dpbf16ps(0, 4, 6);
    }
    _tile_stored(0, scores + j * COLUMNS, COLUMNS * 4);
  }
}

}  // namespace
