// See attend_many.h. Packing keys and values, and the softmax, in plain loops.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "attend_many.h"
#include "numbers.h"

namespace {

inline void pack_keys(const bf16* keys, size_t stride, const int32_t* slots, int n, int dim, bf16* tiles) {
  const int dp = round_up(dim, 32);
  for (int j = 0; j < round_up(n, 32); j += 16)
    for (int d = 0; d < dp; d += 32, tiles += 512) {
      memset(tiles, 0, 512 * sizeof(bf16));
      for (int i = 0; i < 16 && j + i < n; ++i) {
        const bf16* key = keys + slots[j + i] * stride + d;
        for (int e = 0; e < std::min(32, dim - d); ++e) tiles[(e / 2 * 16 + i) * 2 + e % 2] = key[e];
      }
    }
}

inline void pack_values(const bf16* values, size_t stride, const int32_t* slots, int n, int dim, bf16* tiles) {
  const int dp = round_up(dim, 32);
  for (int j = 0; j < n; j += 32, tiles += 32 * dp)
    for (int p = 0; p < 16; ++p) {
      const int at = j + p * 2;
      const bf16* even = at < n ? values + slots[at] * stride : nullptr;
      const bf16* odd = at + 1 < n ? values + slots[at + 1] * stride : nullptr;
      for (int d = 0; d < dp; d += 16) {
        bf16* to = tiles + d / 16 * 512 + p * 32;
        for (int e = 0; e < 16; ++e) {
          to[e * 2] = even && d + e < dim ? even[d + e] : bf16(0);
          to[e * 2 + 1] = odd && d + e < dim ? odd[d + e] : bf16(0);
        }
      }
    }
}

// Scores [from, to) of up to 32 queries become weights relative to each one's largest score so far; what has been
// summed up under a smaller one shrinks. All largest scores first, then all weights: there is no waiting for one
// query's.
inline void soften(float* scores, int rows, int from, int to, int dp, bf16* weights, float* best, float* total,
                   float* sums) {
  alignas(64) float peak[32], kept[32];
  for (int i = 0; i < rows; ++i) {
    const float* row = scores + i * KEYS;
    peak[i] = best[i];
    for (int j = from; j < to; ++j) peak[i] = std::max(peak[i], row[j]);
    if (peak[i] == -INFINITY) {  // nothing to see so far
      memset(weights + i * KEYS + from, 0, sizeof(bf16) * (to - from));
      continue;
    }
    kept[i] = std::exp2(best[i] - peak[i]);
    best[i] = peak[i];
    total[i] *= kept[i];
    for (int j = from; j < to; ++j) {
      const float e = std::exp2(row[j] - peak[i]);
      weights[i * KEYS + j] = to_bf16(e);
      total[i] += e;
    }
    if (kept[i] != 1.0f)
      for (int d = 0; d < dp; ++d) sums[size_t(i) * dp + d] *= kept[i];
  }
}

}  // namespace
