// AMX tiles, of the CPU or emulated.
#pragma once

#include <cstdint>

#include "tiles_config.h"

#ifdef PB_EMULATED_TILES
#include "tiles_emulated.h"
#else
#include "tiles_hardware.h"
#endif

namespace {

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

}  // namespace
