// Unpacking packed weights.
#pragma once

#include <cstdint>
#include <type_traits>

#include "instruction_set.h"
#include "matrix.h"
#include "numbers.h"

#ifdef PB_AVX512
#include "unpack_avx512.h"
#else
#include "unpack_avx2.h"
#endif

namespace {

// Goes through a block of weights, step by step.
template <Format F>
struct Cursor {
  const Matrix& w;
  const int nb;
  int step = 0, rest = 0;

  Cursor(const Matrix& w, int nb) : w(w), nb(nb), rest(w.rest_from[nb]) {}

  // Unpacks a step to `to`. `between(row)` is called after each of its 32 rows.
  template <class Fn>
  void unpack(bf16* to, Fn&& between) {
    if constexpr (in_strips(F)) {
      for (int half = 0; half < 2; ++half)
        unpack_strip<F>(w.strip(nb, half) + step * strip_bytes(F), half * STRIP, to + half * (STEP / 2), between);
    } else {
      unpack_step<F>(w, w.block(nb) + step * step_bytes(F), to, between);
    }
    w.put_rest(nb, step, rest, to);
    ++step;
  }
};

// `f` with the format of `w` as a constant.
template <class Fn>
inline auto by_format(const Matrix& w, Fn&& f) {
  if constexpr (ALL_FORMATS)
    if (w.format == BF12) return f(std::integral_constant<Format, BF12>{});
  if (w.format == NIBBLES) return f(std::integral_constant<Format, NIBBLES>{});
  if (w.format == INT4) return f(std::integral_constant<Format, INT4>{});
  if (w.format == BYTES) return f(std::integral_constant<Format, BYTES>{});
  return f(std::integral_constant<Format, BF16>{});
}

}  // namespace
