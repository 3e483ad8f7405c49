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
  // A stride for rows of the left side: not a multiple of 4 KB, at which all would want the same lines of the cache.
  static int stride(int columns) { return round_up(columns, KB) + KB; }
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
  void add_rest(const bf16* a, int lda, int m, int nb, float* c) const {
    if (format != BF12) return;
    for (int i = rest_from[nb]; i < rest_from[nb + 1]; ++i) {
      const Rest& one = rest[i];
      for (int r = 0; r < m; ++r) c[r * NB + one.row] += to_float(a[size_t(r) * lda + one.column]) * to_float(one.value);
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
#endif

// A block of 32 rows, unpacked: [steps][STEP].
inline void unpack(const Matrix& w, int nb, bf16* to) {
  const uint8_t* p = w.block(nb);
#ifdef PB_AVX512
  if (w.format == BF12) {
    const Unpacker<BF12> unpacker(w);
    int at = w.rest_from[nb];
    for (int s = 0; s < w.steps(); ++s, p += step_bytes(BF12), to += STEP) {
      unpacker.step(p, [&](int r, __m512i row) { _mm512_store_si512(to + r * 32, row); });
      w.put_rest(nb, s, at, to);
    }
    return;
  }
  if (w.format == INT8) {
    const Unpacker<INT8> unpacker(w);
    for (int s = 0; s < w.steps(); ++s, p += step_bytes(INT8), to += STEP)
      unpacker.step(p, [&](int r, __m512i row) { _mm512_store_si512(to + r * 32, row); });
    return;
  }
#else
  if (w.format == INT8) {
    for (int s = 0; s < w.steps(); ++s, p += step_bytes(INT8), to += STEP) {
      float scale[NB];
      for (int j = 0; j < NB; ++j) scale[j] = to_float(reinterpret_cast<const bf16*>(p + STEP)[j]);
      for (int r = 0; r < 32; ++r)
        for (int i = 0; i < 32; ++i)
          to[r * 32 + i] = to_bf16(reinterpret_cast<const int8_t*>(p)[r * 32 + i] * scale[r / 16 * 16 + i / 2]);
    }
    return;
  }
#endif
  memcpy(to, p, w.block_bytes());
}

// ---- blocks of sums ----------------------------------------------------------------------------------------------------

// How far ahead weights are asked for. Farther, they push each other out of the few buffers that wait for memory.
constexpr int AHEAD = 1024;

// The lines of a step, one after the other while its 32 rows are worked on: memory is kept busy all the time.
template <Format F>
inline void ask_ahead(const uint8_t* p, int row) {
  constexpr int lines = int(step_bytes(F) / 64);
  const int line = row * lines / 32;
  if ((row + 1) * lines / 32 > line) _mm_prefetch((const char*)p + AHEAD + line * 64, _MM_HINT_T0);
}

// c[m][NB] (+)= a[m, steps * KB] * tiles^T, for m <= 32 and unpacked `tiles`.
inline void tile_block(const bf16* a, int lda, int m, const bf16* tiles, int steps, float* c, bool add) {
#if defined(PB_AMX)
  const int m0 = std::min(m, 16), m1 = m - m0;
  set_tiles(m0, m1);
  const size_t stride = size_t(lda) * 2;
  if (add) {
    _tile_loadd(0, c, NB * 4);
    _tile_loadd(1, c + 16, NB * 4);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  if (m1) {
    if (add) {
      _tile_loadd(2, c + 16 * NB, NB * 4);
      _tile_loadd(3, c + 16 * NB + 16, NB * 4);
    } else {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int s = 0; s < steps; ++s) {
      _tile_loadd(4, a + s * KB, stride);
      _tile_loadd(6, tiles + s * STEP, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, tiles + s * STEP + 512, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a + size_t(16) * lda + s * KB, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(2, c + 16 * NB, NB * 4);
    _tile_stored(3, c + 16 * NB + 16, NB * 4);
  } else {
    for (int s = 0; s < steps; ++s) {
      _tile_loadd(4, a + s * KB, stride);
      _tile_loadd(6, tiles + s * STEP, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, tiles + s * STEP + 512, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
  }
  _tile_stored(0, c, NB * 4);
  _tile_stored(1, c + 16, NB * 4);
#elif defined(PB_AVX512)
  for (int r = 0; r < m; r += 8) {
    const int rows = std::min(8, m - r);
    __m512 s0[8], s1[8];
    for (int i = 0; i < 8; ++i) {
      s0[i] = add && i < rows ? _mm512_loadu_ps(c + (r + i) * NB) : _mm512_setzero_ps();
      s1[i] = add && i < rows ? _mm512_loadu_ps(c + (r + i) * NB + 16) : _mm512_setzero_ps();
    }
    for (int s = 0; s < steps; ++s)
      for (int p = 0; p < 16; ++p) {
        const __m512bh x = (__m512bh)_mm512_load_si512(tiles + s * STEP + p * 32);
        const __m512bh y = (__m512bh)_mm512_load_si512(tiles + s * STEP + 512 + p * 32);
        for (int i = 0; i < 8; ++i) {
          if (i >= rows) break;
          int32_t pair;
          memcpy(&pair, a + size_t(r + i) * lda + s * KB + p * 2, 4);
          const __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
          s0[i] = _mm512_dpbf16_ps(s0[i], left, x);
          s1[i] = _mm512_dpbf16_ps(s1[i], left, y);
        }
      }
    for (int i = 0; i < rows; ++i) {
      _mm512_storeu_ps(c + (r + i) * NB, s0[i]);
      _mm512_storeu_ps(c + (r + i) * NB + 16, s1[i]);
    }
  }
#else
  if (!add) memset(c, 0, sizeof(float) * m * NB);
  for (int half = 0; half < 2; ++half)
    for (int s = 0; s < steps; ++s)
      for (int p = 0; p < 16; ++p) {
        const bf16* pairs = tiles + s * STEP + half * 512 + p * 32;
        float even[16], odd[16];
        for (int j = 0; j < 16; ++j) even[j] = to_float(pairs[j * 2]), odd[j] = to_float(pairs[j * 2 + 1]);
        for (int i = 0; i < m; ++i) {
          const bf16* left = a + size_t(i) * lda + s * KB + p * 2;
          const float x = to_float(left[0]), y = to_float(left[1]);
          float* sum = c + i * NB + half * 16;
          for (int j = 0; j < 16; ++j) sum[j] += x * even[j] + y * odd[j];
        }
      }
#endif
}

#ifdef PB_AVX512
// The same straight from packed weights, for one or two rows: every number is used where it was unpacked.
template <Format F, int M>
inline void dot_block(const bf16* a, int lda, const Matrix& w, int nb, float* c) {
  const Unpacker<F> unpacker(w);
  const uint8_t* p = w.block(nb);
  __m512 sums[M][4];
  for (auto& row : sums)
    for (auto& one : row) one = _mm512_setzero_ps();
  for (int s = 0; s < w.steps(); ++s, p += step_bytes(F)) {
    unpacker.step(p, [&](int r, __m512i row) {
      ask_ahead<F>(p, r);
#pragma GCC unroll 2
      for (int i = 0; i < M; ++i) {
        int32_t pair;
        memcpy(&pair, a + size_t(i) * lda + s * KB + r % 16 * 2, 4);
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
// The same for up to 32 rows: a step is unpacked into one of two small buffers while the tiles work on the other.
template <Format F>
inline void small_block(const bf16* a, int lda, int m, const Matrix& w, int nb, float* c) {
  alignas(64) bf16 buffer[2][STEP];
  const Unpacker<F> unpacker(w);
  const uint8_t* p = w.block(nb);
  const int m0 = std::min(m, 16), m1 = m - m0, steps = w.steps();
  const size_t stride = size_t(lda) * 2;
  set_tiles(m0, m1);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const auto left = [&](int s) {
    return F == BF16 ? reinterpret_cast<const bf16*>(p + s * step_bytes(F)) : buffer[s & 1];
  };
  // A quarter of step s, in the order that loads each tile once.
  const auto quarter = [&](int s, int which) {
    const bf16* tiles = left(s);
    if (which == 0) {
      _tile_loadd(4, a + s * KB, stride);
      _tile_loadd(6, tiles, 64);
      _tile_dpbf16ps(0, 4, 6);
    } else if (which == 1) {
      _tile_loadd(7, tiles + 512, 64);
      _tile_dpbf16ps(1, 4, 7);
    } else if (m1 && which == 2) {
      _tile_loadd(5, a + size_t(16) * lda + s * KB, stride);
      _tile_dpbf16ps(2, 5, 6);
    } else if (m1) {
      _tile_dpbf16ps(3, 5, 7);
    }
  };
  if constexpr (F == BF16) {
    for (int s = 0; s < steps; ++s)
#pragma GCC unroll 32
      for (int r = 0; r < 32; ++r) {
        ask_ahead<F>(p + s * step_bytes(F), r);
        if (r % 8 == 0) quarter(s, r / 8);
      }
  } else {
    int at = F == BF12 ? w.rest_from[nb] : 0;
    unpacker.step(p, [&](int r, __m512i row) { _mm512_store_si512(buffer[0] + r * 32, row); });
    if constexpr (F == BF12) w.put_rest(nb, 0, at, buffer[0]);
    for (int s = 0; s + 1 < steps; ++s) {
      const uint8_t* next = p + (s + 1) * step_bytes(F);
      bf16* to = buffer[(s + 1) & 1];
      unpacker.step(next, [&](int r, __m512i row) {
        ask_ahead<F>(next, r);
        _mm512_store_si512(to + r * 32, row);
        if (r % 8 == 0) quarter(s, r / 8);
      });
      if constexpr (F == BF12) w.put_rest(nb, s + 1, at, to);
    }
    for (int which = 0; which < 4; ++which) quarter(steps - 1, which);
  }
  _tile_stored(0, c, NB * 4);
  _tile_stored(1, c + 16, NB * 4);
  if (m1) {
    _tile_stored(2, c + 16 * NB, NB * 4);
    _tile_stored(3, c + 16 * NB + 16, NB * 4);
  }
}
#endif

// c[m][NB] = a[m, k] * (block nb of w)^T for m <= 32. `scratch` holds an unpacked block.
inline void block(const bf16* a, int lda, int m, const Matrix& w, int nb, [[maybe_unused]] bf16* scratch, float* c) {
#ifdef PB_AVX512
  const auto by_format = [&](auto&& f) {
    if (w.format == BF16) return f(std::integral_constant<Format, BF16>{});
    if (w.format == BF12) return f(std::integral_constant<Format, BF12>{});
    return f(std::integral_constant<Format, INT8>{});
  };
  if (m <= 2) {
    by_format([&](auto format) {
      if (m == 1)
        dot_block<decltype(format)::value, 1>(a, lda, w, nb, c);
      else
        dot_block<decltype(format)::value, 2>(a, lda, w, nb, c);
    });
    w.add_rest(a, lda, m, nb, c);
    return;
  }
#endif
#ifdef PB_AMX
  by_format([&](auto format) { small_block<decltype(format)::value>(a, lda, m, w, nb, c); });
#else
  const bf16* tiles = reinterpret_cast<const bf16*>(w.block(nb));
  if (w.format != BF16) {
    unpack(w, nb, scratch);
    tiles = scratch;
  }
  tile_block(a, lda, m, tiles, w.steps(), c, false);
#endif
}

// Weights that will be read next begin to move while others are still at work.
inline void warm(const Matrix& w, int nb) {
  if (nb >= w.blocks()) return;
  const char* p = reinterpret_cast<const char*>(w.block(nb));
  for (size_t i = 0; i < std::min(w.block_bytes(), size_t(8192)); i += 64) _mm_prefetch(p + i, _MM_HINT_T1);
}

// ---- products ----------------------------------------------------------------------------------------------------------

// What a thread needs besides: sums of as many rows as are worked on together, and an unpacked block.
struct ProductSpace {
  Buffer<float> c;
  Buffer<bf16> tiles;
};

// Rows of the left side that stay in the second-level cache while blocks of weights pass by.
inline int rows_together(int k_pad) { return std::max(MB, int((size_t(1) << 20) / (size_t(k_pad) * 2)) / MB * MB); }

// Work items of a product: blocks of weights, for each group of rows.
inline int product_items(const Matrix& w, int m) {
  const int together = rows_together(w.k_pad);
  return (m + together - 1) / together * w.blocks();
}

// Every block of a[m, k] * w^T goes to `done(row, rows, block of 32 columns, sums)`.
template <class F>
void product(Shared work, const bf16* a, int lda, int m, const Matrix& w, ProductSpace& space, F&& done) {
  const int together = rows_together(w.k_pad), steps = w.steps();
  int from, to;
  if (m <= MB) {
    float* c = space.c.need(MB * NB);
    bf16* scratch = space.tiles.need(size_t(steps) * STEP);
    while (work.take(from, to))
      for (int nb = from; nb < to; ++nb) {
        block(a, lda, m, w, nb, scratch, c);
        done(0, m, nb, c);
      }
    return;
  }
  // Half of the first-level cache holds a part of the block, over which the rows stream from the second level.
  const int parts = (steps + 11) / 12, some = (steps + parts - 1) / parts;
  float* c = space.c.need(size_t(std::min(round_up(m, MB), together)) * NB);
  while (work.take(from, to))
    for (int item = from; item < to; ++item) {
      const int nb = item % w.blocks(), first = item / w.blocks() * together, last = std::min(m, first + together);
      const bf16* tiles = reinterpret_cast<const bf16*>(w.block(nb));
      if (w.format != BF16) {
        bf16* scratch = space.tiles.need(size_t(steps) * STEP);
        unpack(w, nb, scratch);
        tiles = scratch;
      }
      // The next block is asked for meanwhile, a slice with each block of rows.
      const uint8_t* ahead = item + 1 < to ? w.block((item + 1) % w.blocks()) : nullptr;
      const size_t slice = w.block_bytes() / (size_t(parts) * ((last - first + MB - 1) / MB)) / 64 * 64 + 64;
      for (int s = 0; s < steps; s += some)
        for (int r = first; r < last; r += MB) {
          if (ahead) {
            for (size_t i = 0; i < slice; i += 64) _mm_prefetch((const char*)ahead + i, _MM_HINT_T1);
            ahead += slice;
          }
          const int rows = std::min(MB, last - r);
          float* sums = c + size_t(r - first) * NB;
          tile_block(a + size_t(r) * lda + s * KB, lda, rows, tiles + s * STEP, std::min(some, steps - s), sums, s > 0);
          if (s + some >= steps) {
            done(r, rows, nb, sums);
          }
        }
    }
}

}  // namespace
