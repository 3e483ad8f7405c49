// AMX tiles: loading and configuring them.
#pragma once

#include <cerrno>

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tiles_config.h"

// GCC 12 does not tell itself that these read memory: what is stored before them might be left out or come later.
#undef _tile_loadd
#define _tile_loadd(tile, base, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"((const void*)(base)), "r"((long)(stride)) : "memory")

// The same of what is not needed again soon: it passes by the first level's cache, and what is there stays.
#define tile_load_passing(tile, base, stride) \
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #tile ::"r"((const void*)(base)), "r"((long)(stride)) : "memory")

namespace {

inline void configure_tiles(const TileConfig& c) { __asm__ volatile("ldtilecfg %0" ::"m"(c)); }

// 0, or an errno: the kernel must allow a process to use tiles.
inline int allow_tiles() {
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) ? errno : 0;
}

}  // namespace
