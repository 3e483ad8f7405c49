// AMX tiles: how they are set up, and loading them.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <immintrin.h>

#include "numbers.h"

namespace {

#ifdef PB_AMX
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t colsb[16] = {};
  uint8_t rows[16] = {};
};

#ifdef PB_EMULATED_TILES
// The same tiles in memory, with AVX-512: slow, and right, so that whoever has no AMX can test what is written for it.
// What the instructions would refuse ends the process here too.
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
inline void configure_tiles(const TileConfig& c) { emulated_configure(c); }
#else
// GCC 12 does not tell itself that these read memory: what is stored before them might be left out or come later.
#undef _tile_loadd
#define _tile_loadd(tile, base, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"((const void*)(base)), "r"((long)(stride)) : "memory")

// The same of what is not needed again soon: it passes by the first level's cache, and what is there stays.
#define tile_load_passing(tile, base, stride) \
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #tile ::"r"((const void*)(base)), "r"((long)(stride)) : "memory")

inline void configure_tiles(const TileConfig& c) { __asm__ volatile("ldtilecfg %0" ::"m"(c)); }
#endif

// Tiles 0 to 3 are sums [m0|m1, 16], 4 and 5 the left side [m0|m1, 32], 6 and 7 the right side [16 pairs, 16].
thread_local int tiles_m0 = -1, tiles_m1 = -1;

inline void set_tiles(int m0, int m1) {
  if (m0 == tiles_m0 && m1 == tiles_m1) return;
  TileConfig c;
  for (int t = 0; t < 8; ++t) c.colsb[t] = 64;
  const int n1 = m1 ? m1 : 1;
  const int rows[8] = {m0, m0, n1, n1, m0, n1, 16, 16};
  for (int t = 0; t < 8; ++t) c.rows[t] = uint8_t(rows[t]);
  configure_tiles(c);
  tiles_m0 = m0;
  tiles_m1 = m1;
}

inline void release_tiles() {
  _tile_release();
  tiles_m0 = tiles_m1 = -1;
}
#else
inline void release_tiles() {}
#endif

}  // namespace
