// Blocks of sums in AMX tiles.
#pragma once

#include <algorithm>

#include <immintrin.h>

#include "left.h"
#include "tiles_amx.h"
#include "unpack.h"

namespace {

// Four tiles of sums [m0|m1, 16 + 16], of up to 32 rows: begun with zeros, or with what is in c.
inline void begin_sums(int m, const float* c, bool add) {
  const int m0 = std::min(m, 16), m1 = m - m0;
  set_tiles(m0, m1);
  if (!add) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    return;
  }
  tile_load_passing(0, c, NB * 4);
  tile_load_passing(1, c + 16, NB * 4);
  if (!m1) return;
  tile_load_passing(2, c + 16 * NB, NB * 4);
  tile_load_passing(3, c + 16 * NB + 16, NB * 4);
}

inline void end_sums(int m, float* c) {
  _tile_stored(0, c, NB * 4);
  _tile_stored(1, c + 16, NB * 4);
  if (m <= 16) return;
  _tile_stored(2, c + 16 * NB, NB * 4);
  _tile_stored(3, c + 16 * NB + 16, NB * 4);
}

// A quarter of a step, in the order that loads each tile once. With PASSING the left side streams by.
template <bool PASSING>
inline void quarter(int which, bool both, const bf16* left, const bf16* right) {
  if (which == 0) {
    if constexpr (PASSING)
      tile_load_passing(4, left, KB * 2);
    else
      _tile_loadd(4, left, KB * 2);
    _tile_loadd(6, right, 64);
    _tile_dpbf16ps(0, 4, 6);
  } else if (which == 1) {
    _tile_loadd(7, right + 512, 64);
    _tile_dpbf16ps(1, 4, 7);
  } else if (both && which == 2) {
    if constexpr (PASSING)
      tile_load_passing(5, left + 16 * KB, KB * 2);
    else
      _tile_loadd(5, left + 16 * KB, KB * 2);
    _tile_dpbf16ps(2, 5, 6);
  } else if (both) {
    _tile_dpbf16ps(3, 5, 7);
  }
}

// c[m][NB] (+)= a[m, steps * KB] * tiles^T, for m <= 32 rows that are together in a Left of `height`, and unpacked
// `tiles`. `meanwhile()` is called once per step: what else there is to do fits between tiles.
template <class Fn>
inline void tile_block(const bf16* a, int height, int m, const bf16* tiles, int steps, float* c, bool add,
                       Fn&& meanwhile) {
  begin_sums(m, c, add);
  const auto all = [&](bool both) {
    for (int s = 0; s < steps; ++s, a += height * KB, tiles += STEP) {
      for (int which = 0; which < 4; ++which) quarter<true>(which, both, a, tiles);
      meanwhile();
    }
  };
  if (m > 16)
    all(true);
  else
    all(false);
  end_sums(m, c);
}

// The same of packed weights: tiles work on a step while the next is unpacked. If KEEP, all steps are in `tiles`
// afterwards; if not, `tiles` holds a few.
template <Format F, bool KEEP, class Fn>
inline void packed_block(const bf16* a, int height, int m, Cursor<F>& from, int steps, bf16* tiles, float* c, bool add,
                         Fn&& meanwhile) {
  begin_sums(m, c, add);
  const bool both = m > 16;
  const auto place_of = [&](int s) { return tiles + (KEEP ? s : s & 1) * STEP; };
  from.unpack(place_of(0), [](int) {});
  for (int s = 0; s < steps; ++s, a += height * KB) {
    const bf16* now = place_of(s);
    if (s + 1 < steps)
      from.unpack(place_of(s + 1), [&](int r) {
        if (r % 8 == 0) quarter<KEEP>(r / 8, both, a, now);
      });
    else
      for (int which = 0; which < 4; ++which) quarter<KEEP>(which, both, a, now);
    meanwhile();
  }
  end_sums(m, c);
}

}  // namespace
