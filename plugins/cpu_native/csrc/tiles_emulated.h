// AMX tiles in memory, with AVX-512: slow, and right, so that what is written for AMX can be tested without it. What
// the instructions would refuse ends the process here too.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <immintrin.h>

#include "tiles_config.h"

namespace {

struct EmulatedTile {
  alignas(64) uint8_t rows[16][64];
};

thread_local TileConfig emulated_config;
thread_local EmulatedTile emulated[8];

inline void emulated_configure(const TileConfig& c) {
  emulated_config = c;
  memset(emulated, 0, sizeof emulated);
}
inline void emulated_zero(int t) { memset(&emulated[t], 0, sizeof emulated[t]); }
inline void emulated_load(int t, const void* base, long stride) {
  emulated_zero(t);
  for (int i = 0; i < emulated_config.rows[t]; ++i)
    memcpy(emulated[t].rows[i], static_cast<const char*>(base) + i * stride, emulated_config.colsb[t]);
}
inline void emulated_store(int t, void* base, long stride) {
  for (int i = 0; i < emulated_config.rows[t]; ++i)
    memcpy(static_cast<char*>(base) + i * stride, emulated[t].rows[i], emulated_config.colsb[t]);
}
inline void emulated_products(int sums, int left, int right) {
  const TileConfig& c = emulated_config;
  if (!c.rows[sums] || c.rows[sums] != c.rows[left] || c.colsb[left] != c.rows[right] * 4 ||
      c.colsb[sums] != c.colsb[right]) {
    fprintf(stderr, "tiles %d, %d and %d do not fit together\n", sums, left, right);
    abort();
  }
  for (int i = 0; i < c.rows[sums]; ++i) {
    __m512 sum = _mm512_load_ps(emulated[sums].rows[i]);
    for (int p = 0; p < c.rows[right]; ++p) {
      int32_t pair;
      memcpy(&pair, emulated[left].rows[i] + p * 4, 4);
      sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pair),
                             (__m512bh)_mm512_load_si512(emulated[right].rows[p]));
    }
    _mm512_store_ps(emulated[sums].rows[i], sum);
  }
}

}  // namespace

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_release
#define _tile_loadd(tile, base, stride) emulated_load(tile, base, stride)
#define tile_load_passing(tile, base, stride) emulated_load(tile, base, stride)
#define _tile_stored(tile, base, stride) emulated_store(tile, base, stride)
#define _tile_zero(tile) emulated_zero(tile)
#define _tile_dpbf16ps(sums, left, right) emulated_products(sums, left, right)
#define _tile_release() emulated_configure({})

namespace {

inline void configure_tiles(const TileConfig& c) { emulated_configure(c); }

// 0, or an errno.
inline int allow_tiles() { return 0; }

}  // namespace
