// See attend_one.h. The softmax, and values times weights, in plain loops.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "attend_one.h"

namespace {

// As `soften`, for `columns` queries at once. `kept` [COLUMNS] is what is left of each one's sums so far.
inline void soften_columns(float* scores, int n, int columns, float* best, float* total, float* kept, Ahead&) {
  for (int c = 0; c < columns; ++c) {
    float top = best[c], sum = 0;
    for (int j = 0; j < n; ++j) top = std::max(top, scores[j * COLUMNS + c]);
    for (int j = 0; j < n; ++j) sum += scores[j * COLUMNS + c] = std::exp2(scores[j * COLUMNS + c] - top);
    kept[c] = std::exp2(best[c] - top);
    total[c] = total[c] * kept[c] + sum;
    best[c] = top;
  }
}

// sums float [g][dp] of one KV head += weights [n][COLUMNS] * its values.
inline void weigh_values(const bf16* values, size_t stride, const int32_t* slots, int n, int g, int dim, int dp,
                         const float* weights, float* sums, Ahead&) {
  for (int j = 0; j < n; ++j) {
    const bf16* v = values + slots[j] * stride;
    for (int i = 0; i < g; ++i) {
      const float weight = weights[j * COLUMNS + i];
      float* sum = sums + size_t(i) * dp;
      for (int d = 0; d < dim; ++d) sum[d] += weight * to_float(v[d]);
    }
  }
}

// What `weigh_values` has summed up is in order already.
inline void in_order(float*, int) {}

}  // namespace
