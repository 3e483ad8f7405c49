// Products of attend_many.h without AMX.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attend_many.h"
#include "sums.h"

namespace {

// scores[32][KEYS] of `rows` queries bf16 [32, dp] with keys [from, to) of a packed block, both multiples of 32.
inline void score_block(const bf16* q, int rows, int dp, const bf16* tiles, int from, int to, float* scores) {
  const int steps = dp / 32;
  for (int j = from; j < to; j += 32) {
    const Tiles keys{tiles + size_t(j / 16) * steps * 512, size_t(steps) * 512, 512};
    for (int r = 0; r < rows; r += 8) {
      const Rows queries{q + size_t(r) * dp, size_t(dp), 32};
      some_rows(std::min(8, rows - r), queries, keys, steps, scores + r * KEYS + j, KEYS, false);
    }
  }
}

// sums float [32, dp] += weights bf16 [32][KEYS] * values [from, to) of a packed block.
inline void weigh_block(const bf16* weights, int rows, int dp, const bf16* tiles, int from, int to, float* sums) {
  const int columns = dp / 16;
  for (int d = 0; d < dp; d += 32) {
    const Tiles values{tiles + (size_t(from / 32) * columns + d / 16) * 512, 512, size_t(columns) * 512};
    for (int r = 0; r < rows; r += 8) {
      const Rows some{weights + r * KEYS + from, KEYS, 32};
      some_rows(std::min(8, rows - r), some, values, (to - from) / 32, sums + size_t(r) * dp + d, size_t(dp), true);
    }
  }
}

}  // namespace
