// Products of attend_many.h with AMX tiles.
#pragma once

#include <cstdint>

#include <immintrin.h>

#include "attend_many.h"
#include "tiles_amx.h"

namespace {

// scores[32][KEYS] of `rows` queries bf16 [32, dp] with keys [from, to) of a packed block, both multiples of 32.
inline void score_block(const bf16* q, int rows, int dp, const bf16* tiles, int from, int to, float* scores) {
  const int steps = dp / 32;
  const size_t ldq = size_t(dp) * 2;
  set_tiles(16, 16);
  for (int j = from; j < to; j += 32) {
    const bf16 *k0 = tiles + size_t(j / 16) * steps * 512, *k1 = k0 + size_t(steps) * 512;
    _tile_zero(0);
    _tile_zero(1);
    if (rows > 16) {
      _tile_zero(2);
      _tile_zero(3);
      for (int s = 0; s < steps; ++s) {
        _tile_loadd(4, q + s * 32, ldq);
        _tile_loadd(6, k0 + s * 512, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, k1 + s * 512, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, q + size_t(16) * dp + s * 32, ldq);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(2, scores + 16 * KEYS + j, KEYS * 4);
      _tile_stored(3, scores + 16 * KEYS + j + 16, KEYS * 4);
    } else {
      for (int s = 0; s < steps; ++s) {
        _tile_loadd(4, q + s * 32, ldq);
        _tile_loadd(6, k0 + s * 512, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, k1 + s * 512, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
    }
    _tile_stored(0, scores + j, KEYS * 4);
    _tile_stored(1, scores + j + 16, KEYS * 4);
  }
}

// sums float [32, dp] += weights bf16 [32][KEYS] * values [from, to) of a packed block.
inline void weigh_block(const bf16* weights, int rows, int dp, const bf16* tiles, int from, int to, float* sums) {
  const int columns = dp / 16;
  const size_t lds = size_t(dp) * 4;
  set_tiles(16, 16);
  for (int d = 0; d < dp; d += 32) {
    _tile_loadd(0, sums + d, lds);
    _tile_loadd(1, sums + d + 16, lds);
    if (rows > 16) {
      _tile_loadd(2, sums + size_t(16) * dp + d, lds);
      _tile_loadd(3, sums + size_t(16) * dp + d + 16, lds);
    }
    for (int j = from; j < to; j += 32) {
      const bf16* v = tiles + (size_t(j / 32) * columns + d / 16) * 512;
      _tile_loadd(4, weights + j, KEYS * 2);
      _tile_loadd(6, v, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, v + 512, 64);
      _tile_dpbf16ps(1, 4, 7);
      if (rows > 16) {
        _tile_loadd(5, weights + 16 * KEYS + j, KEYS * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, sums + d, lds);
    _tile_stored(1, sums + d + 16, lds);
    if (rows > 16) {
      _tile_stored(2, sums + size_t(16) * dp + d, lds);
      _tile_stored(3, sums + size_t(16) * dp + d + 16, lds);
    }
  }
}

}  // namespace
