// Unpacking packed weights with AVX-512: the rows of a step come in registers.
#pragma once

#include <cstdint>

#include <immintrin.h>

#include "matrix.h"
#include "prefetch.h"
#include "vectors_avx512.h"

namespace {

// What makes numbers of bytes, loaded once per block.
template <Format F>
struct Unpacker {
  __m512i upper, low4;
  explicit Unpacker(const Matrix& w) {
    upper = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)w.upper));
    low4 = _mm512_set1_epi8(0x0f);
  }

  // `rows(r, row)` for the 32 rows of a step's two tiles: in order, or four of each in turn.
  template <bool IN_TURN = false, class Done>
  inline void step(const uint8_t* p, Done&& rows) const {
    if constexpr (F == BF16) {
#pragma GCC unroll 32
      for (int i = 0; i < 32; ++i) {
        const int r = IN_TURN ? i / 2 + i % 2 * 16 : i;
        rows(r, _mm512_load_si512(p + r * 64));
      }
    } else if constexpr (F == BF12) {
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        const int g = IN_TURN ? i / 2 + i % 2 * 4 : i;
        const __m512i l0 = _mm512_load_si512(p + g * 192), l1 = _mm512_load_si512(p + g * 192 + 64);
        const __m512i codes = _mm512_load_si512(p + g * 192 + 128);
        const __m512i h0 = _mm512_shuffle_epi8(upper, _mm512_and_si512(codes, low4));
        const __m512i h1 = _mm512_shuffle_epi8(upper, _mm512_and_si512(_mm512_srli_epi16(codes, 4), low4));
        rows(g * 4, _mm512_unpacklo_epi8(l0, h0));
        rows(g * 4 + 1, _mm512_unpackhi_epi8(l0, h0));
        rows(g * 4 + 2, _mm512_unpacklo_epi8(l1, h1));
        rows(g * 4 + 3, _mm512_unpackhi_epi8(l1, h1));
      }
    }
  }
};

// Where x is, but the compiler does not see that: broadcasts of what has just been stored there are to be loads, of
// which a core can do more than permutations within a register.
inline const float* somewhere(const float* x) {
  __asm__("" : "+r"(x));
  return x;
}

// Of a strip's step, in float32: 16 scales, and those of 4 bits have 16 least numbers.
constexpr int grid_floats(Format f) { return f == BYTES ? STRIP : STRIP * 2; }

// The same of a strip.
template <Format F>
struct StripUnpacker {
  static_assert(in_strips(F));

  // The step's scales, float32 [grid_floats(F)].
  static inline void grids(const uint8_t* p, float* to) {
    if constexpr (F == INT4) {
      const __m512i words = _mm512_load_si512(p + code_bytes(F)), low = _mm512_set1_epi32(ZERO_BITS);
      const __m512 scales = _mm512_castsi512_ps(_mm512_andnot_si512(low, words));
      const __m512 zeros = _mm512_cvtepi32_ps(_mm512_and_si512(words, low));
      _mm512_storeu_ps(to, scales);
      _mm512_storeu_ps(to + STRIP, _mm512_fnmadd_ps(zeros, scales, _mm512_setzero_ps()));
      return;
    }
    for (int i = 0; i < grid_floats(F); i += STRIP)
      _mm512_storeu_ps(to + i,
                       _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(p + code_bytes(F) + i * sizeof(float16)))));
  }

  // `rows(r, numbers)` for the 16 rows of a step, in order: 32 columns each.
  template <class Done>
  inline void step(const uint8_t* p, Done&& rows) const {
    alignas(64) float grid[grid_floats(F)];
    grids(p, grid);
    const float* at = somewhere(grid);
#pragma GCC unroll 4
    for (int g = 0; g < STRIP; g += 4) {
      const __m512i codes = in_nibbles(F) ? _mm512_load_si512(p + g * 16) : _mm512_setzero_si512();
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m512i shifted = i ? _mm512_srli_epi16(codes, i * 4) : codes;
        rows(g + i, in_nibbles(F) ? of_nibbles(shifted, at, g + i) : of_bytes(p, at, g + i));
      }
    }
  }

  // Row r: its codes are in the lowest four bits of every number; what the upper ones are does not matter.
  inline __m512i of_nibbles(__m512i codes, const float* grid, int r) const {
    return _mm512_permutexvar_epi16(codes, points_of(grid, r));
  }
  // The 16 points of a row, twice.
  inline __m512i points_of(const float* grid, int r) const {
    const __m512 all = _mm512_fmadd_ps(points, _mm512_set1_ps(grid[r]), _mm512_set1_ps(grid[STRIP + r]));
    return (__m512i)_mm512_cvtne2ps_pbh(all, all);
  }
  inline __m512i of_bytes(const uint8_t* p, const float* grid, int r) const {
    const __m512 by = _mm512_set1_ps(grid[r]);
    const auto part = [&](int from) {
      const __m512i codes = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(p + r * KB + from)));
      return _mm512_mul_ps(_mm512_cvtepi32_ps(codes), by);
    };
    return (__m512i)_mm512_cvtne2ps_pbh(part(16), part(0));
  }

 private:
  const __m512 points = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
};

// R rows of a strip from `first` on, a divisor of 4 or a multiple: the others are left alone.
template <Format F, int R>
struct StripRows {
  explicit StripRows(int first) : first_(first) {
    for (int i = 0; i < R; ++i) shift_[i] = _mm512_set1_epi16(short((first + i) % 4 * 4));
  }

  // 32 columns of each of them. `grid` is what StripUnpacker::grids has made of the step.
  inline void step(const uint8_t* p, const float* grid, __m512i (&rows)[R]) const {
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      const int r = first_ + i;
      if constexpr (in_nibbles(F))
        rows[i] = unpacker_.of_nibbles(_mm512_srlv_epi16(_mm512_load_si512(p + r / 4 * 64), shift_[i]), grid, r);
      else
        rows[i] = unpacker_.of_bytes(p, grid, r);
    }
  }

  // The same in two parts, for steps of one grid: what `grid` says of the rows, and then each step.
  inline void begin(const float* grid) {
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) points_[i] = unpacker_.points_of(grid, first_ + i);
  }
  inline void step(const uint8_t* p, __m512i (&rows)[R]) const {
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      const __m512i codes = _mm512_srlv_epi16(_mm512_load_si512(p + (first_ + i) / 4 * 64), shift_[i]);
      rows[i] = _mm512_permutexvar_epi16(codes, points_[i]);
    }
  }

 private:
  const int first_;
  const StripUnpacker<F> unpacker_;
  __m512i shift_[R], points_[R];
};

// See Cursor. A step of weights that are not in strips.
template <Format F, class Fn>
inline void unpack_step(const Matrix& w, const uint8_t* p, bf16* to, Fn&& between) {
  const Unpacker<F> unpacker(w);
  unpacker.step(p, [&](int r, __m512i row) {
    ask_ahead<step_bytes(F), 32>(p, r);
    _mm512_store_si512(to + r * 32, row);
    between(r);
  });
}

// See Cursor. A strip's step, the first row of which is row `first` of the block.
template <Format F, class Fn>
inline void unpack_strip(const uint8_t* p, int first, bf16* to, Fn&& between) {
  __m512i rows[STRIP];
  StripUnpacker<F>().step(p, [&](int r, __m512i row) {
    ask_ahead<strip_bytes(F), STRIP>(p, r);
    rows[r] = row;
  });
  transpose16(rows);
  for (int r = 0; r < STRIP; ++r) {
    _mm512_store_si512(to + r * 32, rows[r]);
    between(first + r);
  }
}

}  // namespace
