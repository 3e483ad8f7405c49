// Blocks of sums without AMX: a few rows at a time.
#pragma once

#include <algorithm>

#include "left.h"
#include "sums.h"
#include "unpack.h"

namespace {

// There are none to allow or to release.
inline int allow_tiles() { return 0; }
inline void release_tiles() {}

// c[m][NB] (+)= a[m, steps * KB] * tiles^T, for m <= 32 rows that are together in a Left of `height`, and unpacked
// `tiles`. `meanwhile()` is called once per step: what else there is to do fits between tiles.
template <class Fn>
inline void tile_block(const bf16* a, int height, int m, const bf16* tiles, int steps, float* c, bool add,
                       Fn&& meanwhile) {
  const int groups = (m + 7) / 8;
  for (int g = 0; g < groups; ++g) {
    const int r = g * 8, rows = std::min(8, m - r);
    some_rows(rows, {a + r * KB, KB, size_t(height) * KB}, {tiles, 512, STEP}, steps, c + r * NB, NB, add);
    for (int s = steps * g / groups; s < steps * (g + 1) / groups; ++s) meanwhile();
  }
}

// The same of packed weights: tiles work on a step while the next is unpacked. If KEEP, all steps are in `tiles`
// afterwards; if not, `tiles` holds a few.
template <Format F, bool KEEP, class Fn>
inline void packed_block(const bf16* a, int height, int m, Cursor<F>& from, int steps, bf16* tiles, float* c, bool add,
                         Fn&& meanwhile) {
  for (int s = 0; s < steps; s += UNPACKED) {
    const int n = std::min(UNPACKED, steps - s);
    bf16* to = KEEP ? tiles + s * STEP : tiles;
    for (int i = 0; i < n; ++i) from.unpack(to + i * STEP, [](int) {});
    tile_block(a + size_t(s) * height * KB, height, m, to, n, c, add || s > 0, meanwhile);
  }
}

}  // namespace
