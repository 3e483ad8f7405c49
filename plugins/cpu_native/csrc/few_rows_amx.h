// See few_rows.h. A row or two by dot products, more of them with tiles.
#pragma once

#include <cstdint>

#include <immintrin.h>

#include "blocks_amx.h"
#include "dots_avx512.h"
#include "few_rows.h"

namespace {

// How many rows are multiplied without tiles.
constexpr int most_dots(Format f) { return in_strips(f) ? 1 : 2; }

// What `turn_left` makes of a, for `block`; null where it needs none.
template <Format F>
inline const bf16* right_side(const Left& a, int m, int steps, Buffer<bf16>& space) {
  return in_strips(F) && m > most_dots(F) ? turned(a, m, steps, space) : nullptr;
}

// The same as `dot_block` for weights in strips, and one row of which a step is `stride` numbers from the next: 16
// parts of a sum for each row of a strip, added up at the end.
template <Format F>
inline void dot_strips(const bf16* a, size_t stride, const Matrix& w, int nb, float* c) {
  const StripUnpacker<F> unpacker;
  const uint8_t* p = w.block(nb);
  for (int half = 0; half < 2; ++half) {
    __m512 sums[STRIP];
    for (auto& one : sums) one = _mm512_setzero_ps();
    for (int s = 0; s < w.steps(); ++s, p += strip_bytes(F)) {
      const __m512bh left = (__m512bh)_mm512_loadu_si512(a + s * stride);
      unpacker.step(p, [&](int r, __m512i row) {
        ask_ahead<strip_bytes(F), STRIP>(p, r);
        sums[r] = _mm512_dpbf16_ps(sums[r], left, (__m512bh)row);
      });
    }
    _mm512_storeu_ps(c + half * STRIP, sums_of(sums));
  }
}

// The same for weights that are not in strips, and one or two rows.
template <Format F>
inline void dot_some(const bf16* a, int height, int m, const Matrix& w, int nb, float* c) {
  const size_t stride = size_t(height) * KB;
  if (m == 1)
    dot_block<F, 1>(a, stride, w, nb, c);
  else if (m == 2)
    dot_block<F, 2>(a, stride, w, nb, c);
}

// c[m][NB] of weights in strips and what `turn_left` has made of m <= 32 rows. `scratch` holds a step. One strip after
// the other: both together would load fewer tiles, but memory is read best in one long run.
template <Format F>
inline void strips_block(const bf16* turned, int m, const Matrix& w, int nb, bf16* scratch, float* c) {
  const StripUnpacker<F> unpacker;
  const bool both = m > 16;
  const int steps = w.steps();
  set_tiles(16, 16);
  for (int half = 0; half < 2; ++half) {
    const uint8_t* p = w.strip(nb, half);
    const bf16* right = turned;
    const auto unpack = [&](int s, auto&& between) {
      bf16* to = scratch + (s & 1) * (STEP / 2);
      unpacker.step(p, [&](int r, __m512i row) {
        ask_ahead<strip_bytes(F), STRIP>(p, r);
        _mm512_store_si512(to + r * KB, row);
        between(r);
      });
      p += strip_bytes(F);
    };
    const auto multiply = [&](int s, int part) {
      if (part == 0) {
        _tile_loadd(4, scratch + (s & 1) * (STEP / 2), KB * 2);
        _tile_loadd(6, right, 64);
        _tile_dpbf16ps(0, 4, 6);
      } else if (both) {
        _tile_loadd(7, right + 512, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
    };
    _tile_zero(0);
    _tile_zero(1);
    unpack(0, [](int) {});
    for (int s = 0; s < steps; ++s, right += both ? 1024 : 512)
      if (s + 1 < steps)
        unpack(s + 1, [&](int r) {
          if (r % 8 == 0) multiply(s, r / 8);
        });
      else
        for (int part = 0; part < 2; ++part) multiply(s, part);
    alignas(64) float sums[STRIP * MB];
    _tile_stored(0, sums, MB * sizeof(float));
    if (both) _tile_stored(1, sums + 16, MB * sizeof(float));
    turn_sums(sums, m, c + half * STRIP);
  }
}

// The same for up to 32 rows of plain weights, which come from memory.
inline void plain_block(const bf16* a, int height, int m, const Matrix& w, int nb, float* c) {
  const bf16* tiles = reinterpret_cast<const bf16*>(w.block(nb));
  const bool both = m > 16;
  begin_sums(m, c, false);
  for (int s = 0; s < w.steps(); ++s, a += height * KB, tiles += STEP)
#pragma GCC unroll 32
    for (int r = 0; r < 32; ++r) {
      ask_ahead<step_bytes(BF16), 32>(reinterpret_cast<const uint8_t*>(tiles), r);
      if (r % 8 == 0) quarter<false>(r / 8, both, a, tiles);
    }
  end_sums(m, c);
}

// c[m][NB] = a[m, k] * (block nb of w)^T for m <= 32. `turned` is what `turn_left` made of a, where it is of use;
// `scratch` holds an unpacked block.
template <Format F>
inline void block(const Left& a, const bf16* turned, int m, const Matrix& w, int nb, bf16* scratch, float* c) {
  if (m <= most_dots(F)) {
    if constexpr (in_strips(F))
      for (int i = 0; i < m; ++i) dot_strips<F>(a.data + i * KB, size_t(a.height) * KB, w, nb, c + i * NB);
    else
      dot_some<F>(a.data, a.height, m, w, nb, c);
    return add_rest(w, a, m, nb, c);
  }
  if constexpr (in_strips(F)) {
    strips_block<F>(turned, m, w, nb, scratch, c);
    add_rest(w, a, m, nb, c);
  } else if constexpr (F == BF16) {
    plain_block(a.data, a.height, m, w, nb, c);
  } else {
    Cursor<F> from(w, nb);
    packed_block<F, false>(a.data, a.height, m, from, w.steps(), scratch, c, false, [] {});
  }
}

}  // namespace
