// See few_rows.h. As many rows as there are, like other blocks.
#pragma once

#include <cstdint>

#include "blocks.h"
#include "few_rows.h"

namespace {

// `block` needs nothing of the kind.
template <Format F>
inline const bf16* right_side(const Left&, int, int, Buffer<bf16>&) {
  return nullptr;
}

// c[m][NB] = a[m, k] * (block nb of w)^T for m <= 32. `scratch` holds an unpacked block.
template <Format F>
inline void block(const Left& a, const bf16*, int m, const Matrix& w, int nb, bf16* scratch, float* c) {
  if constexpr (F == BF16) {
    tile_block(a.data, a.height, m, reinterpret_cast<const bf16*>(w.block(nb)), w.steps(), c, false, [] {});
  } else {
    Cursor<F> from(w, nb);
    packed_block<F, false>(a.data, a.height, m, from, w.steps(), scratch, c, false, [] {});
  }
}

}  // namespace
