// See attend_one.h. Scores in plain loops.
#pragma once

#include <cstdint>

#include "attend_one.h"
#include "numbers.h"

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
  for (int j = 0; j < n; ++j) {
    ahead.ask(ahead.lines_of_slot() / 3);
    for (int h = 0; h < heads; ++h) {
      const bf16* key = first + at[j] * stride + h * dim;
      for (int i = 0; i < g; ++i) {
        const bf16* head = q + size_t(h * g + i) * dp;
        float sum = 0;
        for (int d = 0; d < dim; ++d) sum += to_float(head[d]) * to_float(key[d]);
        scores[j * COLUMNS + h * g + i] = sum;
      }
    }
  }
}

}  // namespace
