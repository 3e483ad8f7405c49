// AMX tiles: how they are set up, and loading them.
#pragma once

#include <cstdint>

#include <immintrin.h>

#include "numbers.h"

namespace {

#ifdef PB_AMX
// GCC 12 does not tell itself that these read memory: what is stored before them might be left out or come later.
#undef _tile_loadd
#define _tile_loadd(tile, base, stride)                                                             \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"((const void*)(base)), "r"((long)(stride)) \
                   : "memory")

// The same of what is not needed again soon: it passes by the first level's cache, and what is there stays.
#define tile_load_passing(tile, base, stride)                                                          \
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #tile ::"r"((const void*)(base)), "r"((long)(stride)) \
                   : "memory")

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t colsb[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 3 are sums [m0|m1, 16], 4 and 5 the left side [m0|m1, 32], 6 and 7 the right side [16 pairs, 16].
thread_local int tiles_m0 = -1, tiles_m1 = -1;

inline void set_tiles(int m0, int m1) {
  if (m0 == tiles_m0 && m1 == tiles_m1) return;
  TileConfig c;
  for (int t = 0; t < 8; ++t) c.colsb[t] = 64;
  const int n1 = m1 ? m1 : 1;
  const int rows[8] = {m0, m0, n1, n1, m0, n1, 16, 16};
  for (int t = 0; t < 8; ++t) c.rows[t] = uint8_t(rows[t]);
  __asm__ volatile("ldtilecfg %0" ::"m"(c));
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
