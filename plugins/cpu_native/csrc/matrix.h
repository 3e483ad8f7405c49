// Weights, packed, and products with them.
//
// At small batches a step takes as long as reading the weights does, so what counts is how few bytes they are and that
// they are asked for in time. Three formats:
//
// - BF16: as they are.
// - BF12: the same numbers in 12 bits. Nearly all exponents of a matrix lie in a few neighbouring binades, so the upper
//   byte of a number (sign and the upper seven bits of the exponent) becomes a sign and one of eight values of a table;
//   the lower byte stays. The few numbers that do not fit are kept in a list and put back. Nothing is lost.
// - INT8: 8 bits and a bf16 scale for every 32 columns of a row. Something is lost, so somebody has to ask for it.
//
// In all of them a matrix is blocks of 32 rows, a block is steps of 32 columns, and a step, unpacked, is two tiles of 16
// rows: 16 pairs of columns of 16 rows x 2 numbers. That is what AMX loads and what a bf16 dot product reads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include <immintrin.h>

#include "numbers.h"
#include "team.h"

namespace {

// ---- tiles -------------------------------------------------------------------------------------------------------------

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

// ---- formats -----------------------------------------------------------------------------------------------------------

enum Format { BF16 = 0, BF12 = 1, INT8 = 2 };

constexpr int MB = 32, NB = 32, KB = 32;  // rows, columns of a block of sums; columns of a step
constexpr int STEP = NB * KB;             // numbers of a step

constexpr size_t step_bytes(Format f) {
  return f == BF16 ? STEP * 2 : f == BF12 ? STEP * 3 / 2 : STEP + NB * 2;
}

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

// Where number `i` of row `j` (both below 32) stands in an unpacked step.
inline int place(int j, int i) { return (j / 16) * 512 + (i / 2) * 32 + (j % 16) * 2 + (i & 1); }

struct Matrix {
  struct Rest {
    int32_t column;
    int16_t row;  // in its block
    bf16 value;
  };

  int n = 0, k = 0, n_pad = 0, k_pad = 0;
  Format format = BF16;
  uint8_t* data = nullptr;             // in the model's arena
  alignas(64) uint8_t upper[16] = {};  // BF12: the upper byte for each code
  uint8_t code_of[128] = {};           // the code for each upper byte without its sign; 8 where there is none
  std::vector<int32_t> rest_from;      // BF12: where each block's numbers begin in `rest`
  std::vector<Rest> rest;              // in the order of their steps

  int steps() const { return k_pad / KB; }
  int blocks() const { return n_pad / NB; }
  size_t block_bytes() const { return steps() * step_bytes(format); }
  const uint8_t* block(int nb) const { return data + nb * block_bytes(); }

  // `row(j)` points to k numbers, or is null, which stands for zeros. May throw std::bad_alloc.
  template <class Row>
  void pack(Team& team, Arena& arena, int n_, int k_, Format wanted, Row&& row) {
    n = n_, k = k_, n_pad = round_up(n, NB), k_pad = round_up(k, KB);
    format = wanted;
#ifndef PB_AVX512
    if (format == BF12) format = BF16;
#endif
    if (format == BF12 && !choose_upper(team, row)) format = BF16;
    data = arena.take(block_bytes() * blocks());
    std::vector<std::vector<Rest>> found(blocks());
    std::atomic<int> next{0};
    team.run([&](int) {
      for (int nb; (nb = next.fetch_add(1)) < blocks();)
        for (int s = 0; s < steps(); ++s) pack_step(row, nb, s, found[nb]);
    });
    rest_from.assign(1, 0);
    rest.clear();
    for (auto& one : found) {
      rest.insert(rest.end(), one.begin(), one.end());
      rest_from.push_back(int32_t(rest.size()));
    }
  }

  // What is kept apart of a step, into its unpacked numbers. `at` goes through the block's rest, step by step.
  void put_rest(int nb, int step, int& at, bf16* to) const {
    for (; at < rest_from[nb + 1] && rest[at].column < (step + 1) * KB; ++at)
      to[place(rest[at].row, rest[at].column % KB)] = rest[at].value;
  }

  // c[m rows][NB] += what of block nb is kept apart, times a: for the few rows whose weights are nowhere unpacked.
  void add_rest(const Left& a, int m, int nb, float* c) const {
    if (format != BF12) return;
    for (int i = rest_from[nb]; i < rest_from[nb + 1]; ++i) {
      const Rest& one = rest[i];
      const bf16* from = a.row(0).at(one.column);
      for (int r = 0; r < m; ++r) c[r * NB + one.row] += to_float(from[r * KB]) * to_float(one.value);
    }
  }

 private:
  // The seven upper bytes that most numbers have, besides that of zero. False where too many numbers have another one.
  template <class Row>
  bool choose_upper(Team& team, Row&& row) {
    std::vector<std::vector<int64_t>> counts(team.size(), std::vector<int64_t>(128));
    std::atomic<int> next{0};
    team.run([&](int id) {
      for (int j; (j = next.fetch_add(1)) < n;)
        if (const bf16* from = row(j))
          for (int i = 0; i < k; ++i) ++counts[id][(from[i] >> 8) & 0x7f];
    });
    std::vector<std::pair<int64_t, int>> most;
    int64_t left = 0;
    for (int u = 1; u < 128; ++u) {
      int64_t count = 0;
      for (auto& one : counts) count += one[u];
      most.push_back({-count, u});
      left += count;
    }
    std::sort(most.begin(), most.end());
    memset(upper, 0, sizeof upper);
    for (int code = 1; code < 8; ++code) {
      upper[code] = uint8_t(most[code - 1].second);
      left += most[code - 1].first;
    }
    memset(code_of, 8, sizeof code_of);
    for (int code = 0; code < 8; ++code) {
      upper[8 + code] = upper[code] | 0x80;
      code_of[upper[code]] = uint8_t(code);
    }
    return left <= int64_t(n) * k / 256;
  }

  template <class Row>
  void pack_step(Row&& row, int nb, int s, std::vector<Rest>& found) {
    alignas(64) bf16 plain[STEP] = {};
    for (int j = 0; j < NB; ++j) {
      const int at = nb * NB + j, columns = std::min(KB, k - s * KB);
      const bf16* from = at < n ? row(at) : nullptr;
      if (!from) continue;
      bf16* to = plain + j / 16 * 512 + j % 16 * 2;
      for (int i = 0; i < columns; ++i) to[i / 2 * 32 + (i & 1)] = from[s * KB + i];
    }
    uint8_t* to = data + nb * block_bytes() + s * step_bytes(format);
    if (format == BF16) {
      memcpy(to, plain, sizeof plain);
    } else if (format == BF12) {
      pack12(plain, to, s, found);
    } else {
      pack8(plain, to);
    }
  }

  // 128 numbers at a time, four rows of a tile: 64 lower bytes, 64 more, 64 pairs of codes. The order within is that in
  // which unpacking bytes of two registers gives rows of a tile.
  void pack12(const bf16* plain, uint8_t* to, int s, std::vector<Rest>& found) const {
    for (int g = 0; g < STEP / 128; ++g, to += 192) {
      memset(to + 128, 0, 64);
      for (int half = 0; half < 2; ++half)
        for (int b = 0; b < 64; ++b) {
          // Byte b: lane b / 16; its first eight bytes belong to one row of the tile, the others to the next.
          const int which = g * 128 + half * 64 + (b % 16 / 8) * 32 + (b / 16) * 8 + b % 8;
          bf16 x = plain[which];
          int code = code_of[(x >> 8) & 0x7f];
          if (code == 8) {
            const int in = which % 512, j = which / 512 * 16 + in % 32 / 2, i = in / 32 * 2 + in % 2;
            found.push_back({s * KB + i, int16_t(j), x});
            x = 0, code = 0;
          }
          to[half * 64 + b] = uint8_t(x);
          to[128 + b] |= uint8_t((code | (x >> 15) << 3) << (half * 4));
        }
    }
  }

  // 1024 numbers as in an unpacked step, then 32 scales.
  static void pack8(const bf16* plain, uint8_t* to) {
    bf16* scales = reinterpret_cast<bf16*>(to + STEP);
    for (int j = 0; j < NB; ++j) {
      float most = 0;
      for (int i = 0; i < KB; ++i) most = std::max(most, std::fabs(to_float(plain[place(j, i)])));
      bf16 scale = to_bf16(most / 127.0f);
      if (to_float(scale) * 127.5f < most) ++scale;
      scales[j] = scale;
      const float factor = to_float(scale) > 0 ? 1.0f / to_float(scale) : 0.0f;
      for (int i = 0; i < KB; ++i) {
        const float q = std::nearbyint(to_float(plain[place(j, i)]) * factor);
        reinterpret_cast<int8_t*>(to)[place(j, i)] = int8_t(std::min(127.0f, std::max(-127.0f, q)));
      }
    }
  }
};

// ---- unpacking ---------------------------------------------------------------------------------------------------------

#ifdef PB_AVX512
inline void store_row(bf16* to, __m512i row) { _mm512_store_si512(to, row); }

// What makes numbers of bytes, loaded once per block.
template <Format F>
struct Unpacker {
  __m512i upper, low4;
  explicit Unpacker(const Matrix& w) {
    upper = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)w.upper));
    low4 = _mm512_set1_epi8(0x0f);
  }

  // `rows(r, row)` for the 32 rows of a step's two tiles, in order.
  template <class Done>
  inline void step(const uint8_t* p, Done&& rows) const {
    if constexpr (F == BF16) {
#pragma GCC unroll 32
      for (int r = 0; r < 32; ++r) rows(r, _mm512_load_si512(p + r * 64));
    } else if constexpr (F == BF12) {
#pragma GCC unroll 8
      for (int g = 0; g < 8; ++g) {
        const __m512i l0 = _mm512_load_si512(p + g * 192), l1 = _mm512_load_si512(p + g * 192 + 64);
        const __m512i codes = _mm512_load_si512(p + g * 192 + 128);
        const __m512i h0 = _mm512_shuffle_epi8(upper, _mm512_and_si512(codes, low4));
        const __m512i h1 = _mm512_shuffle_epi8(upper, _mm512_and_si512(_mm512_srli_epi16(codes, 4), low4));
        rows(g * 4, _mm512_unpacklo_epi8(l0, h0));
        rows(g * 4 + 1, _mm512_unpackhi_epi8(l0, h0));
        rows(g * 4 + 2, _mm512_unpacklo_epi8(l1, h1));
        rows(g * 4 + 3, _mm512_unpackhi_epi8(l1, h1));
      }
    } else {
      const __m512i first = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
      const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
#pragma GCC unroll 2
      for (int t = 0; t < 2; ++t) {
        const __m512 scale = _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_load_si256((const __m256i*)(p + STEP + t * 32))), 16));
        const __m512 low = _mm512_permutexvar_ps(first, scale), high = _mm512_permutexvar_ps(second, scale);
#pragma GCC unroll 16
        for (int r = 0; r < 16; ++r) {
          const uint8_t* q = p + t * 512 + r * 32;
          const __m512 x = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128((const __m128i*)q)));
          const __m512 y = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128((const __m128i*)(q + 16))));
          rows(t * 16 + r, (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(y, high), _mm512_mul_ps(x, low)));
        }
      }
    }
  }
};
#else
struct Numbers {
  bf16 x[32];
};
inline void store_row(bf16* to, const Numbers& row) { memcpy(to, row.x, sizeof row.x); }

template <Format F>
struct Unpacker {
  explicit Unpacker(const Matrix&) {}

  template <class Done>
  inline void step(const uint8_t* p, Done&& rows) const {
    static_assert(F == INT8, "plain weights are not unpacked, and 12 bits take AVX-512");
    const bf16* scales = reinterpret_cast<const bf16*>(p + STEP);
    for (int r = 0; r < 32; ++r) {
      Numbers row;
      for (int i = 0; i < 32; ++i)
        row.x[i] = to_bf16(reinterpret_cast<const int8_t*>(p)[r * 32 + i] * to_float(scales[r / 16 * 16 + i / 2]));
      rows(r, row);
    }
  }
};
#endif

// How far ahead weights are asked for. Farther, they push each other out of the few buffers that wait for memory.
constexpr int AHEAD = 1024;

// The lines of a step, one after the other while its 32 rows are worked on: memory is kept busy all the time.
template <Format F>
inline void ask_ahead(const uint8_t* p, int row) {
  constexpr int lines = int(step_bytes(F) / 64);
  const int line = row * lines / 32;
  if ((row + 1) * lines / 32 > line) _mm_prefetch((const char*)p + AHEAD + line * 64, _MM_HINT_T0);
}

// Goes through a block of weights, step by step.
template <Format F>
struct Cursor {
  const Matrix& w;
  const Unpacker<F> unpacker;
  const int nb;
  int step = 0, rest = 0;
  const uint8_t* p;

  Cursor(const Matrix& w, int nb) : w(w), unpacker(w), nb(nb), rest(F == BF12 ? w.rest_from[nb] : 0), p(w.block(nb)) {}

  // Unpacks a step to `to`. `between(row)` is called after each of its 32 rows.
  template <class Fn>
  void unpack(bf16* to, Fn&& between) {
    unpacker.step(p, [&](int r, auto row) {
      ask_ahead<F>(p, r);
      store_row(to + r * 32, row);
      between(r);
    });
    if constexpr (F == BF12) w.put_rest(nb, step, rest, to);
    p += step_bytes(F);
    ++step;
  }
};

// `f` with the format of `w` as a constant.
template <class Fn>
inline auto by_format(const Matrix& w, Fn&& f) {
#ifdef PB_AVX512
  if (w.format == BF12) return f(std::integral_constant<Format, BF12>{});
#endif
  if (w.format == INT8) return f(std::integral_constant<Format, INT8>{});
  return f(std::integral_constant<Format, BF16>{});
}

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
  for (int r = 0; r < m; r += 8) {
    const int rows = std::min(8, m - r);
    __m512 s0[8], s1[8];
    for (int i = 0; i < 8; ++i) {
      s0[i] = add && i < rows ? _mm512_loadu_ps(c + (r + i) * NB) : _mm512_setzero_ps();
      s1[i] = add && i < rows ? _mm512_loadu_ps(c + (r + i) * NB + 16) : _mm512_setzero_ps();
    }
    for (int s = 0; s < steps; ++s) {
      for (int p = 0; p < 16; ++p) {
        const __m512bh x = (__m512bh)_mm512_load_si512(tiles + s * STEP + p * 32);
        const __m512bh y = (__m512bh)_mm512_load_si512(tiles + s * STEP + 512 + p * 32);
        for (int i = 0; i < 8; ++i) {
          if (i >= rows) break;
          int32_t pair;
          memcpy(&pair, a + (size_t(s) * height + r + i) * KB + p * 2, 4);
          const __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
          s0[i] = _mm512_dpbf16_ps(s0[i], left, x);
          s1[i] = _mm512_dpbf16_ps(s1[i], left, y);
        }
      }
      if (r == 0) meanwhile();
    }
    for (int i = 0; i < rows; ++i) {
      _mm512_storeu_ps(c + (r + i) * NB, s0[i]);
      _mm512_storeu_ps(c + (r + i) * NB + 16, s1[i]);
    }
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
// if not, `tiles` holds two.
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
  for (int s = 0; s < steps; ++s) from.unpack(tiles + s * STEP, [](int) {});
  tile_block(a, height, m, tiles, steps, c, add, meanwhile);
#endif
}

#ifdef PB_AVX512
// The same straight from packed weights, for one or two rows, all of a Left: every number is used where it was unpacked.
template <Format F, int M>
inline void dot_block(const bf16* a, const Matrix& w, int nb, float* c) {
  const Unpacker<F> unpacker(w);
  const uint8_t* p = w.block(nb);
  __m512 sums[M][4];
  for (auto& row : sums)
    for (auto& one : row) one = _mm512_setzero_ps();
  for (int s = 0; s < w.steps(); ++s, p += step_bytes(F), a += M * KB) {
    unpacker.step(p, [&](int r, __m512i row) {
      ask_ahead<F>(p, r);
#pragma GCC unroll 2
      for (int i = 0; i < M; ++i) {
        int32_t pair;
        memcpy(&pair, a + i * KB + r % 16 * 2, 4);
        __m512& sum = sums[i][r / 16 * 2 + (r & 1)];
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)row);
      }
    });
  }
  for (int i = 0; i < M; ++i)
    for (int half = 0; half < 2; ++half)
      _mm512_storeu_ps(c + i * NB + half * 16, _mm512_add_ps(sums[i][half * 2], sums[i][half * 2 + 1]));
}
#endif

#ifdef PB_AMX
// The same for up to 32 rows of plain weights, which come from memory.
inline void plain_block(const bf16* a, int height, int m, const Matrix& w, int nb, float* c) {
  const bf16* tiles = reinterpret_cast<const bf16*>(w.block(nb));
  const bool both = m > 16;
  begin_sums(m, c, false);
  for (int s = 0; s < w.steps(); ++s, a += height * KB, tiles += STEP)
#pragma GCC unroll 32
    for (int r = 0; r < 32; ++r) {
      ask_ahead<BF16>(reinterpret_cast<const uint8_t*>(tiles), r);
      if (r % 8 == 0) quarter<false>(r / 8, both, a, tiles);
    }
  end_sums(m, c);
}
#endif

// c[m][NB] = a[m, k] * (block nb of w)^T for m <= 32. `scratch` holds an unpacked block.
inline void block(const Left& a, int m, const Matrix& w, int nb, bf16* scratch, float* c) {
  by_format(w, [&](auto format) {
    constexpr Format F = decltype(format)::value;
#ifdef PB_AVX512
    if (m <= 2) {
      if (m == 1)
        dot_block<F, 1>(a.p, w, nb, c);
      else
        dot_block<F, 2>(a.p, w, nb, c);
      w.add_rest(a, m, nb, c);
      return;
    }
#endif
    if constexpr (F == BF16) {
#ifdef PB_AMX
      plain_block(a.p, a.height, m, w, nb, c);
#else
      tile_block(a.p, a.height, m, reinterpret_cast<const bf16*>(w.block(nb)), w.steps(), c, false, [] {});
#endif
    } else {
      Cursor<F> from(w, nb);
      packed_block<F, false>(a.p, a.height, m, from, w.steps(), scratch, c, false, [] {});
    }
  });
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
  Buffer<bf16> tiles;
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
  if (m > MB) {
    by_format(w, [&](auto format) { wide_product<decltype(format)::value>(work, division, a, m, w, space, done); });
    return;
  }
  float* c = space.c.need(MB * NB);
  bf16* scratch = space.tiles.need(size_t(w.steps()) * STEP);
  OneByOne items{work};
  for (int nb; (nb = items.next()) >= 0;) {
    block(a, m, w, nb, scratch, c);
    done(0, m, nb, c);
  }
}

}  // namespace
