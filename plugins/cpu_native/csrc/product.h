// Products of rows with packed weights.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <immintrin.h>

#include "matrix.h"
#include "numbers.h"
#include "team.h"
#include "tiles.h"

namespace {

// ---- the left side -----------------------------------------------------------------------------------------------------

// The left side of products as tiles read it: for every 32 rows (or all, where there are fewer) and step of 32 columns the
// rows' parts of it, one after another. Columns up to a multiple of 32 have to be zero.
struct Left {
  bf16* p;
  int steps, height;  // steps of a row; rows together

  Left(bf16* p, int columns, int rows) : p(p), steps((columns + KB - 1) / KB), height(std::min(rows, MB)) {}
  static size_t size(int columns, int rows) { return size_t(round_up(columns, KB)) * round_up(rows, MB); }

  struct Row {
    bf16* p;
    size_t step;
    bf16* at(int column) const { return p + column / KB * step + column % KB; }
    void zero_from(int column) const {
      if (column % KB) memset(at(column), 0, (KB - column % KB) * sizeof(bf16));
    }
  };
  Row row(int i) const { return {rows(i / MB * MB) + i % MB * KB, size_t(height) * KB}; }
  // From row i on, a multiple of 32; the next step is `height` * 32 numbers further.
  bf16* rows(int i) const { return p + size_t(i) * steps * KB; }
};

// ---- blocks of sums ----------------------------------------------------------------------------------------------------

#ifdef PB_AMX
// Four tiles of sums [m0|m1, 16 + 16], of up to 32 rows: begun with zeros, or with what is in c.
inline void begin_sums(int m, const float* c, bool add) {
  const int m0 = std::min(m, 16), m1 = m - m0;
  set_tiles(m0, m1);
  if (!add) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    return;
  }
  tile_load_passing(0, c, NB * 4);
  tile_load_passing(1, c + 16, NB * 4);
  if (!m1) return;
  tile_load_passing(2, c + 16 * NB, NB * 4);
  tile_load_passing(3, c + 16 * NB + 16, NB * 4);
}

inline void end_sums(int m, float* c) {
  _tile_stored(0, c, NB * 4);
  _tile_stored(1, c + 16, NB * 4);
  if (m <= 16) return;
  _tile_stored(2, c + 16 * NB, NB * 4);
  _tile_stored(3, c + 16 * NB + 16, NB * 4);
}

// A quarter of a step, in the order that loads each tile once. With PASSING the left side streams by.
template <bool PASSING>
inline void quarter(int which, bool both, const bf16* left, const bf16* right) {
  if (which == 0) {
    if constexpr (PASSING)
      tile_load_passing(4, left, KB * 2);
    else
      _tile_loadd(4, left, KB * 2);
    _tile_loadd(6, right, 64);
    _tile_dpbf16ps(0, 4, 6);
  } else if (which == 1) {
    _tile_loadd(7, right + 512, 64);
    _tile_dpbf16ps(1, 4, 7);
  } else if (both && which == 2) {
    if constexpr (PASSING)
      tile_load_passing(5, left + 16 * KB, KB * 2);
    else
      _tile_loadd(5, left + 16 * KB, KB * 2);
    _tile_dpbf16ps(2, 5, 6);
  } else if (both) {
    _tile_dpbf16ps(3, 5, 7);
  }
}
#endif

// Steps that are unpacked and then multiplied with: they are still in the first level's cache, and sums, which pass through
// memory in between, do so seldom.
constexpr int UNPACKED = 8;

#if defined(PB_AVX512) && !defined(PB_AMX)
// Where rows of 32 columns each are, how far a row is from the next, and the next 32 columns of them: in numbers.
struct Rows {
  const bf16* p;
  size_t row, step;
};

// Tiles of 16 pairs x 16 columns: the first, how far the one with the next 16 columns is, and the one with the next pairs.
struct Tiles {
  const bf16* p;
  size_t apart, step;
};

// See `rows_times_tiles`. What Rows and Tiles consist of comes one by one: a core stalls where it has just stored the parts of a
// struct and loads it as a whole.
template <int R, int C>
__attribute__((noinline)) void sum_products(const bf16* a, size_t row, size_t a_step, const bf16* b, size_t apart, size_t b_step,
                                            int steps, float* c, size_t ld, bool add) {
  __m512 sums[R][C];
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i)
    for (int half = 0; half < C; ++half)
      sums[i][half] = add ? _mm512_loadu_ps(c + i * ld + half * 16) : _mm512_setzero_ps();
  for (int s = 0; s < steps; ++s, a += a_step, b += b_step) {
#pragma GCC unroll 4
    for (int p = 0; p < 16; ++p) {
      __m512bh right[C];
      for (int half = 0; half < C; ++half) right[half] = (__m512bh)_mm512_load_si512(b + half * apart + p * 32);
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) {
        int32_t pair;
        memcpy(&pair, a + i * row + p * 2, 4);
        const __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
        for (int half = 0; half < C; ++half) sums[i][half] = _mm512_dpbf16_ps(sums[i][half], left, right[half]);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i)
    for (int half = 0; half < C; ++half) _mm512_storeu_ps(c + i * ld + half * 16, sums[i][half]);
}

// c[R][C * 16] (+)= rows * tiles, over `steps` times 32 columns of the rows. All sums stay in registers: with less than 12 of
// them a core would wait for each. Rows of c are `ld` apart.
template <int R, int C>
inline void rows_times_tiles(const Rows& a, const Tiles& b, int steps, float* c, size_t ld, bool add) {
  sum_products<R, C>(a.p, a.row, a.step, b.p, b.apart, b.step, steps, c, ld, add);
}

// The same for up to 8 rows. An odd number of them takes one more along, whose sums nobody reads: there is room for it both
// in a Left and in c.
inline void some_rows(int rows, const Rows& a, const Tiles& b, int steps, float* c, size_t ld, bool add) {
  switch ((rows + 1) / 2) {
    case 1: return rows_times_tiles<2, 2>(a, b, steps, c, ld, add);
    case 2: return rows_times_tiles<4, 2>(a, b, steps, c, ld, add);
    case 3: return rows_times_tiles<6, 2>(a, b, steps, c, ld, add);
    default: return rows_times_tiles<8, 2>(a, b, steps, c, ld, add);
  }
}
#endif

// c[m][NB] (+)= a[m, steps * KB] * tiles^T, for m <= 32 rows that are together in a Left of `height`, and unpacked `tiles`.
// `meanwhile()` is called once per step: what else there is to do fits between tiles.
template <class Fn>
inline void tile_block(const bf16* a, int height, int m, const bf16* tiles, int steps, float* c, bool add, Fn&& meanwhile) {
#if defined(PB_AMX)
  begin_sums(m, c, add);
  const auto all = [&](bool both) {
    for (int s = 0; s < steps; ++s, a += height * KB, tiles += STEP) {
      for (int which = 0; which < 4; ++which) quarter<true>(which, both, a, tiles);
      meanwhile();
    }
  };
  if (m > 16)
    all(true);
  else
    all(false);
  end_sums(m, c);
#elif defined(PB_AVX512)
  const int groups = (m + 7) / 8;
  for (int g = 0; g < groups; ++g) {
    const int r = g * 8, rows = std::min(8, m - r);
    some_rows(rows, {a + r * KB, KB, size_t(height) * KB}, {tiles, 512, STEP}, steps, c + r * NB, NB, add);
    for (int s = steps * g / groups; s < steps * (g + 1) / groups; ++s) meanwhile();
  }
#else
  if (!add) memset(c, 0, sizeof(float) * m * NB);
  for (int s = 0; s < steps; ++s) {
    for (int half = 0; half < 2; ++half)
      for (int p = 0; p < 16; ++p) {
        const bf16* pairs = tiles + s * STEP + half * 512 + p * 32;
        float even[16], odd[16];
        for (int j = 0; j < 16; ++j) even[j] = to_float(pairs[j * 2]), odd[j] = to_float(pairs[j * 2 + 1]);
        for (int i = 0; i < m; ++i) {
          const bf16* left = a + (size_t(s) * height + i) * KB + p * 2;
          const float x = to_float(left[0]), y = to_float(left[1]);
          float* sum = c + i * NB + half * 16;
          for (int j = 0; j < 16; ++j) sum[j] += x * even[j] + y * odd[j];
        }
      }
    meanwhile();
  }
#endif
}

// The same of packed weights: tiles work on a step while the next is unpacked. If KEEP, all steps are in `tiles` afterwards;
// if not, `tiles` holds a few.
template <Format F, bool KEEP, class Fn>
inline void packed_block(const bf16* a, int height, int m, Cursor<F>& from, int steps, bf16* tiles, float* c, bool add,
                         Fn&& meanwhile) {
#ifdef PB_AMX
  begin_sums(m, c, add);
  const bool both = m > 16;
  const auto place_of = [&](int s) { return tiles + (KEEP ? s : s & 1) * STEP; };
  from.unpack(place_of(0), [](int) {});
  for (int s = 0; s < steps; ++s, a += height * KB) {
    const bf16* now = place_of(s);
    if (s + 1 < steps)
      from.unpack(place_of(s + 1), [&](int r) {
        if (r % 8 == 0) quarter<KEEP>(r / 8, both, a, now);
      });
    else
      for (int which = 0; which < 4; ++which) quarter<KEEP>(which, both, a, now);
    meanwhile();
  }
  end_sums(m, c);
#else
  for (int s = 0; s < steps; s += UNPACKED) {
    const int n = std::min(UNPACKED, steps - s);
    bf16* to = KEEP ? tiles + s * STEP : tiles;
    for (int i = 0; i < n; ++i) from.unpack(to + i * STEP, [](int) {});
    tile_block(a + size_t(s) * height * KB, height, m, to, n, c, add || s > 0, meanwhile);
  }
#endif
}

#ifdef PB_AVX512
// The same straight from packed weights, for a few rows, of which a step is `stride` numbers from the next: every number is
// used where it was unpacked.
template <Format F, int M>
inline void dot_block(const bf16* a, size_t stride, const Matrix& w, int nb, float* c) {
  // A sum is ready some cycles after it was begun; of one or two rows' there would be too few to wait for.
  constexpr int PARTS = M <= 2 ? 2 : 1;
  const Unpacker<F> unpacker(w);
  const uint8_t* p = w.block(nb);
  __m512 sums[M][2][PARTS];
  for (auto& row : sums)
    for (auto& half : row)
      for (auto& one : half) one = _mm512_setzero_ps();
  for (int s = 0; s < w.steps(); ++s, p += step_bytes(F), a += stride) {
    int seen = 0;  // memory is asked in its own order
    unpacker.template step<PARTS == 1>(p, [&](int r, __m512i row) {
      ask_ahead<step_bytes(F), 32>(p, seen++);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        int32_t pair;
        memcpy(&pair, a + i * KB + r % 16 * 2, 4);
        __m512& sum = sums[i][r / 16][r % PARTS];
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)row);
      }
    });
  }
  for (int i = 0; i < M; ++i)
    for (int half = 0; half < 2; ++half) {
      const __m512* parts = sums[i][half];
      _mm512_storeu_ps(c + i * NB + half * 16, PARTS == 1 ? parts[0] : _mm512_add_ps(parts[0], parts[PARTS - 1]));
    }
}

// How many rows are multiplied without tiles.
constexpr int most_dots(Format f) {
#ifdef PB_AMX
  return in_strips(f) ? 1 : 2;
#else
  return in_strips(f) ? 12 : MB;
#endif
}

// The sum of each of 16 registers.
inline __m512 sums_of(const __m512 (&x)[16]) {
  __m512 pairs[8], fours[4], eights[2];
  for (int i = 0; i < 8; ++i)
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[i * 2], x[i * 2 + 1]), _mm512_unpackhi_ps(x[i * 2], x[i * 2 + 1]));
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(pairs[i * 2]), b = _mm512_castps_pd(pairs[i * 2 + 1]);
    fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const auto join = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  for (int i = 0; i < 2; ++i) eights[i] = join(fours[i * 2], fours[i * 2 + 1]);
  return join(eights[0], eights[1]);
}

// The same for weights in strips, and one row of which a step is `stride` numbers from the next: 16 parts of a sum for each row
// of a strip, added up at the end.
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

#ifndef PB_AMX
// The same for M rows: R rows of a strip at a time, over all steps, so that all sums stay in registers. `grids` holds the
// scales of a strip.
template <Format F, int M, int R>
inline void dot_strips(const bf16* a, size_t stride, const Matrix& w, int nb, float* grids, float* c) {
  constexpr int SOME = grid_floats(F);
  const int steps = w.steps();
  for (int half = 0; half < 2; ++half) {
    const uint8_t* strip = w.strip(nb, half);
    const size_t bytes = steps * strip_bytes(F);
    // Memory is asked for the next strip, as many lines per step as R rows of it have.
    const char *ahead = reinterpret_cast<const char*>(strip) + bytes, *const ahead_end = ahead + bytes;
    constexpr int LINES = int((strip_bytes(F) * R / STRIP + 63) / 64);
    for (int s = 0; s < steps; ++s) StripUnpacker<F>::grids(strip + s * strip_bytes(F), grids + s * SOME);
    __m512 sums[M][STRIP];
    for (int first = 0; first < STRIP; first += R) {
      const StripRows<F, R> unpacker(first);
      __m512 now[R][M];
      for (auto& row : now)
        for (auto& one : row) one = _mm512_setzero_ps();
      const uint8_t* p = strip;
      const bf16* left = a;
      const float* grid = grids;
      for (int s = 0; s < steps; ++s, p += strip_bytes(F), left += stride, grid += SOME) {
        for (int line = 0; line < LINES && ahead < ahead_end; ++line, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T0);
        __m512i rows[R];
        unpacker.step(p, grid, rows);
#pragma GCC unroll 8
        for (int j = 0; j < M; ++j) {
          const __m512bh numbers = (__m512bh)_mm512_loadu_si512(left + j * KB);
#pragma GCC unroll 8
          for (int i = 0; i < R; ++i) now[i][j] = _mm512_dpbf16_ps(now[i][j], (__m512bh)rows[i], numbers);
        }
      }
      for (int i = 0; i < R; ++i)
        for (int j = 0; j < M; ++j) sums[j][first + i] = now[i][j];
    }
    for (int j = 0; j < M; ++j) _mm512_storeu_ps(c + j * NB + half * STRIP, sums_of(sums[j]));
  }
}

// The same for m rows, 8 at a time.
template <Format F>
inline void dot_some_strips(const bf16* a, int height, int m, const Matrix& w, int nb, bf16* scratch, float* c) {
  float* grids = reinterpret_cast<float*>(scratch);
  const size_t stride = size_t(height) * KB;
  for (; m > 0; m -= 8, a += 8 * KB, c += 8 * NB) switch (m) {
      case 1: dot_strips<F, 1, 4>(a, stride, w, nb, grids, c); break;
      case 2: dot_strips<F, 2, 8>(a, stride, w, nb, grids, c); break;
      case 3: dot_strips<F, 3, 4>(a, stride, w, nb, grids, c); break;
      case 4: dot_strips<F, 4, 4>(a, stride, w, nb, grids, c); break;
      case 5: dot_strips<F, 5, 2>(a, stride, w, nb, grids, c); break;
      case 6: dot_strips<F, 6, 2>(a, stride, w, nb, grids, c); break;
      case 7: dot_strips<F, 7, 2>(a, stride, w, nb, grids, c); break;
      default: dot_strips<F, 8, 2>(a, stride, w, nb, grids, c); break;
    }
}
#endif

// The same for weights that are not in strips.
template <Format F>
inline void dot_some(const bf16* a, int height, int m, const Matrix& w, int nb, float* c) {
  const size_t stride = size_t(height) * KB;
  for (; m > 0; m -= 8, a += 8 * KB, c += 8 * NB) switch (m) {
      case 1: dot_block<F, 1>(a, stride, w, nb, c); break;
      case 2: dot_block<F, 2>(a, stride, w, nb, c); break;
#ifndef PB_AMX
      case 3: dot_block<F, 3>(a, stride, w, nb, c); break;
      case 4: dot_block<F, 4>(a, stride, w, nb, c); break;
      case 5: dot_block<F, 5>(a, stride, w, nb, c); break;
      case 6: dot_block<F, 6>(a, stride, w, nb, c); break;
      case 7: dot_block<F, 7>(a, stride, w, nb, c); break;
      default: dot_block<F, 8>(a, stride, w, nb, c); break;
#endif
    }
}
#endif

#ifdef PB_AVX512
// Up to 32 rows as the right side of a product whose left side is weights: for every step a tile or two of 16 pairs of
// columns x 16 rows x 2.
inline void turn_left(const Left& a, int m, int steps, bf16* to) {
  for (int s = 0; s < steps; ++s)
    for (int r = 0; r < m; r += 16, to += 512) {
      __m512i rows[16];
      for (int i = 0; i < 16; ++i)
        rows[i] = r + i < m ? _mm512_loadu_si512(a.p + (size_t(s) * a.height + r + i) * KB) : _mm512_setzero_si512();
      transpose16(rows);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i * 32, rows[i]);
    }
}

// c[m][NB] (16 columns of it) of sums float [16][32], for m <= 32.
inline void turn_sums(const float* sums, int m, float* c) {
  for (int r = 0; r < m; r += 16) {
    __m512i rows[16];
    for (int i = 0; i < 16; ++i) rows[i] = _mm512_load_si512(sums + i * MB + r);
    transpose16(rows);
    for (int i = 0; i < std::min(16, m - r); ++i) _mm512_storeu_si512(c + (r + i) * NB, rows[i]);
  }
}
#endif

#ifdef PB_AMX
// c[m][NB] of weights in strips and what `turn_left` has made of m <= 32 rows. `scratch` holds a step. One strip after the
// other: both together would load fewer tiles, but memory is read best in one long run.
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
#endif

#if defined(PB_AVX512) && !defined(PB_AMX)
// c[m][NB] of weights in strips and what `turn_left` has made of m <= 32 rows. `scratch` holds a few steps. Rows of weights are
// the left side, as they come: as the right side each 16 of them would have to be transposed.
template <Format F>
inline void strips_block(const bf16* turned, int m, const Matrix& w, int nb, bf16* scratch, float* c) {
  const StripUnpacker<F> unpacker;
  const int steps = w.steps(), columns = m > 16 ? 2 : 1;
  const uint8_t* p = w.block(nb);
  for (int half = 0; half < 2; ++half) {
    alignas(64) float sums[STRIP * MB];
    const bf16* right = turned;
    for (int s = 0; s < steps; s += UNPACKED) {
      const int n = std::min(UNPACKED, steps - s);
      for (int i = 0; i < n; ++i, p += strip_bytes(F))
        unpacker.step(p, [&](int r, __m512i row) {
          ask_ahead<strip_bytes(F), STRIP>(p, r);
          _mm512_store_si512(scratch + (i * STRIP + r) * KB, row);
        });
      const Tiles tiles{right, 512, size_t(columns) * 512};
      constexpr size_t STEP_OF_STRIP = STRIP * KB;
      if (columns == 1)
        rows_times_tiles<16, 1>({scratch, KB, STEP_OF_STRIP}, tiles, n, sums, MB, s > 0);
      else
        for (int r = 0; r < STRIP; r += 8)
          rows_times_tiles<8, 2>({scratch + r * KB, KB, STEP_OF_STRIP}, tiles, n, sums + r * MB, MB, s > 0);
      right += n * tiles.step;
    }
    turn_sums(sums, m, c + half * STRIP);
  }
}
#endif

// c[m rows][NB] += what of block nb is kept apart, times a: for the few rows whose weights are nowhere unpacked.
inline void add_rest(const Matrix& w, const Left& a, int m, int nb, float* c) {
  for (int i = w.rest_from[nb]; i < w.rest_from[nb + 1]; ++i) {
    const Matrix::Rest& one = w.rest[i];
    const bf16* from = a.row(0).at(one.column);
    for (int r = 0; r < m; ++r) c[r * NB + one.row] += to_float(from[r * KB]) * to_float(one.value);
  }
}

// c[m][NB] = a[m, k] * (block nb of w)^T for m <= 32. `turned` is what `turn_left` made of a, where it is of use; `scratch`
// holds an unpacked block.
template <Format F>
inline void block(const Left& a, const bf16* turned, int m, const Matrix& w, int nb, bf16* scratch, float* c) {
#ifdef PB_AVX512
  if (m <= most_dots(F)) {
    if constexpr (!in_strips(F)) {
      dot_some<F>(a.p, a.height, m, w, nb, c);
    } else {
#ifdef PB_AMX
      for (int i = 0; i < m; ++i) dot_strips<F>(a.p + i * KB, size_t(a.height) * KB, w, nb, c + i * NB);
#else
      dot_some_strips<F>(a.p, a.height, m, w, nb, scratch, c);
#endif
    }
    return add_rest(w, a, m, nb, c);
  }
#endif
#ifdef PB_AVX512
  if constexpr (in_strips(F)) {
    strips_block<F>(turned, m, w, nb, scratch, c);
    return add_rest(w, a, m, nb, c);
  }
#endif
  if constexpr (F == BF16) {
#ifdef PB_AMX
    plain_block(a.p, a.height, m, w, nb, c);
#else
    tile_block(a.p, a.height, m, reinterpret_cast<const bf16*>(w.block(nb)), w.steps(), c, false, [] {});
#endif
  } else {
    (void)turned;
    Cursor<F> from(w, nb);
    packed_block<F, false>(a.p, a.height, m, from, w.steps(), scratch, c, false, [] {});
  }
}

// Weights that will be read next begin to move while others are still at work.
inline void warm(const Matrix& w, int nb) {
  if (nb >= w.blocks()) return;
  const char* p = reinterpret_cast<const char*>(w.block(nb));
  for (size_t i = 0; i < std::min(w.block_bytes(), size_t(8192)); i += 64) _mm_prefetch(p + i, _MM_HINT_T1);
}

// ---- products ----------------------------------------------------------------------------------------------------------

// What a thread needs besides: sums and unpacked blocks.
struct ProductSpace {
  Buffer<float> c;
  Buffer<bf16> tiles, turned;
};

// How a product is divided: into items, a block of weights for a group of rows each, group by group. All threads work on all
// rows, each with its part of the weights, where these rows stay in a core's cache. Where they do not, each has rows of its
// own, and all of the weights: what one core has written another one is slow to get.
struct Division {
  int together, groups, blocks, part;  // rows of a group; items of a thread

  Division(const Matrix& w, int m, int threads) : blocks(w.blocks()) {
    const int most = std::max(MB, int(CACHED / (size_t(w.k_pad) * 2)) / MB * MB);
    const int own = m <= most ? m : rows_of_one(m, threads), apart = m <= most ? 1 : threads, each = (own + most - 1) / most;
    together = round_up((own + each - 1) / each, MB);
    groups = apart * each;
    part = (items() + threads - 1) / threads;
  }
  int items() const { return groups * blocks; }

  // Rows of a thread, where each has its own.
  static int rows_of_one(int m, int threads) { return round_up((m + threads - 1) / threads, MB); }

 private:
  static constexpr size_t CACHED = size_t(1) << 20;  // half of the second level
};

// Steps of unpacked weights that stay in the first level's cache while rows pass by.
constexpr int MOST_STEPS = 20;

// More than 32 rows. A part of a block of weights, as much as the first level's cache holds, is unpacked with the first 32
// rows; then the others pass by. While tiles work on a block of sums, the one before is given away, row by row, and memory is
// asked for the next block of weights.
template <Format F, class Done>
void wide_product(Shared& work, const Division& division, const Left& a, int m, const Matrix& w, ProductSpace& space,
                  Done&& done) {
  const int steps = w.steps(), parts = (steps + MOST_STEPS - 1) / MOST_STEPS, some = (steps + parts - 1) / parts;
  const int rows_per_step = (MB + some - 1) / some, most_blocks = (division.together + MB - 1) / MB;
  // One more than are worked on: the last ones of a block of weights are given away while the next is worked on.
  const int places = parts == 1 ? 2 : most_blocks + 1;
  float* c = space.c.need(size_t(places) * MB * NB);
  bf16* scratch = F == BF16 ? nullptr : space.tiles.need(size_t(some) * STEP);
  struct {
    int row = 0, rows = 0, nb = 0, given = 0;
    const float* sums = nullptr;
  } ready;
  const auto give = [&](int most) {
    const int n = std::min(most, ready.rows - ready.given);
    if (n <= 0) return;
    done(ready.row + ready.given, n, ready.nb, ready.sums + ready.given * NB);
    ready.given += n;
  };
  OneByOne items{work};
  int begin = 0;  // where the sums of the first rows are
  for (int item = items.next(), later; item >= 0; item = later) {
    const int nb = item % division.blocks, first = item / division.blocks * division.together;
    const int last = std::min(m, first + division.together);
    const int blocks = std::max(0, last - first + MB - 1) / MB;
    later = items.next();
    const char* ahead = reinterpret_cast<const char*>(later >= 0 ? w.block(later % division.blocks) : nullptr);
    const size_t slice = ahead ? w.block_bytes() / 64 / (size_t(std::max(1, blocks)) * steps) + 1 : 0;
    Cursor<F> from(w, nb);
    for (int s = 0; s < steps; s += some) {
      const int count = std::min(some, steps - s);
      for (int i = 0; i < blocks; ++i) {
        const int r = first + i * MB, rows = std::min(MB, last - r);
        float* sums = c + size_t((begin + i) % places) * MB * NB;
        const bf16* left = a.rows(r) + size_t(s) * a.height * KB;
        const auto meanwhile = [&] {
          give(rows_per_step);
          for (size_t line = 0; line < slice; ++line, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
        };
        if constexpr (F == BF16)
          tile_block(left, a.height, rows, reinterpret_cast<const bf16*>(w.block(nb)) + s * STEP, count, sums, s > 0, meanwhile);
        else if (i == 0)
          packed_block<F, true>(left, a.height, rows, from, count, scratch, sums, s > 0, meanwhile);
        else
          tile_block(left, a.height, rows, scratch, count, sums, s > 0, meanwhile);
        give(MB);
        if (s + some >= steps) ready = {r, rows, nb, 0, sums};
      }
    }
    begin = (begin + blocks) % places;
  }
  give(MB);
}

// Every block of a[m, k] * w^T goes to `done(row, rows, block of 32 columns, sums)`, at most 32 rows at a time.
template <class Done>
void product(Shared work, const Division& division, const Left& a, int m, const Matrix& w, ProductSpace& space, Done&& done) {
  by_format(w, [&](auto format) {
    constexpr Format F = decltype(format)::value;
    if (m > MB) return wide_product<F>(work, division, a, m, w, space, done);
    float* c = space.c.need(MB * NB);
    bf16 *scratch = space.tiles.need(size_t(w.steps()) * STEP), *turned = nullptr;
#ifdef PB_AVX512
    if (in_strips(F) && m > most_dots(F)) {
      turned = space.turned.need(size_t(w.steps()) * 1024);
      turn_left(a, m, w.steps(), turned);
    }
#endif
    OneByOne items{work};
    for (int nb; (nb = items.next()) >= 0;) {
      block<F>(a, turned, m, w, nb, scratch, c);
      done(0, m, nb, c);
    }
  });
}

}  // namespace
