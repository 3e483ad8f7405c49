// Unpacking packed weights in plain loops: of the packed formats there is only BYTES.
#pragma once

#include <cstdint>
#include <cstring>

#include "matrix.h"

namespace {

// See Cursor. Weights that are neither plain nor in strips do not occur.
template <Format F, class Fn>
void unpack_step(const Matrix& w, const uint8_t* p, bf16* to, Fn&& between);

// See Cursor. A strip's step, the first row of which is row `first` of the block.
template <Format F, class Fn>
inline void unpack_strip(const uint8_t* p, int first, bf16* to, Fn&& between) {
  static_assert(F == BYTES, "the others take AVX-512");
  const float16* scales = reinterpret_cast<const float16*>(p + code_bytes(F));
  for (int r = 0; r < STRIP; ++r) {
    const float scale = float_of_16(scales[r]);
    bf16 row[KB];
    for (int i = 0; i < KB; ++i) row[i] = to_bf16(reinterpret_cast<const int8_t*>(p)[r * KB + i] * scale);
    for (int i = 0; i < KB; i += 2) memcpy(to + place(r, i), row + i, 4);
    between(first + r);
  }
}

}  // namespace
