// Weights that lie on a grid: 32 neighbours of a row are `scale * code + least`, rounded to bf16.
//
// So do those of a checkpoint that was once quantised, as a GGUF file's are, whatever type they were stored in
// afterwards. Its scales are float16, and found again from the rounded numbers alone: each of these says within which
// bounds the exact one was, which leaves few scales, and for each of them few least numbers, to be tried.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "instruction_set.h"
#include "vectors.h"

namespace {

constexpr int GRID = 32;  // numbers of one grid

struct OnGrid {
  float16 scale = 0, least = 0;
  int8_t code[GRID] = {};
};

// Half of the distance between neighbouring bf16 numbers around x.
inline float half_step(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits &= 0x7f800000;
  memcpy(&x, &bits, 4);
  return x / 256;
}

// On 255 points around zero, as near as there are any. False where one is infinite or no number, or too large.
inline bool nearest_of_255(const bf16* x, OnGrid& found) {
  float most = 0;
  for (int i = 0; i < GRID; ++i) {
    const float size = std::fabs(to_float(x[i]));
    if (!(size < 65000)) return false;
    most = std::max(most, size);
  }
  found.scale = to_float16(most / 127);
  if (float_of_16(found.scale) * 127.5f < most) ++found.scale;
  found.least = 0;
  const float scale = float_of_16(found.scale), factor = scale > 0 ? 1 / scale : 0;
  for (int i = 0; i < GRID; ++i)
    found.code[i] = int8_t(std::min(127.0f, std::max(-127.0f, std::nearbyint(to_float(x[i]) * factor))));
  return true;
}

}  // namespace

#ifdef PB_AVX512
#include "grid_avx512.h"
#else
#include "grid_avx2.h"
#endif
