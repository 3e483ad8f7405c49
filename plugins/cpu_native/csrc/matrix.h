// Weights, packed, and products with them.
#pragma once

#include "numbers.h"
#include "team.h"

namespace {

#ifdef PB_AMX
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
  _tile_loadconfig(&c);
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

// ---- matrices ----------------------------------------------------------------------------------------------------------

// A weight [n, k], packed: blocks of 16 rows, in each of them steps of 32 columns, in each of these 16 pairs of columns,
// in each pair 16 rows x 2. That is what a tile loads, what a bf16 dot product reads, and plain enough for other code.
struct Matrix {
  int n = 0, k = 0, n_pad = 0, k_pad = 0;
  bf16* data = nullptr;

  // `rows_of` has n pointers to k numbers each; null stands for zeros.
  void pack(const bf16* const* rows_of, int n_, int k_) {
    n = n_, k = k_, n_pad = round_up(n, 32), k_pad = round_up(k, 32);
    free(data);
    data = aligned<bf16>(size_t(n_pad) * k_pad);
    for (int nb = 0; nb < n_pad / 16; ++nb)
      for (int kb = 0; kb < k_pad / 32; ++kb) {
        alignas(64) bf16 part[16][32] = {};
        for (int j = 0; j < 16; ++j) {
          const int row = nb * 16 + j, columns = std::min(32, k - kb * 32);
          if (row < n && rows_of[row]) memcpy(part[j], rows_of[row] + kb * 32, sizeof(bf16) * columns);
        }
        uint32_t* tile = reinterpret_cast<uint32_t*>(at(nb, kb));
        const uint32_t* pairs = reinterpret_cast<const uint32_t*>(&part[0][0]);
        for (int p = 0; p < 16; ++p)
          for (int j = 0; j < 16; ++j) tile[p * 16 + j] = pairs[j * 16 + p];
      }
  }
  bf16* at(int nb, int kb) const { return data + (size_t(nb) * (k_pad / 32) + kb) * 512; }
  ~Matrix() { free(data); }
};

constexpr int MB = 32, NB = 32;  // a block of sums

// c[MB][NB] = a[m, k] * w[32 rows from n-block nb (of 32), k]^T, for m <= 32 rows of `a` with row stride `lda`.
inline void block(const bf16* a, int lda, int m, const Matrix& w, int nb, float* c) {
  const int steps = w.k_pad / 32;
#if defined(PB_AMX)
  const int m0 = std::min(m, 16), m1 = m - m0;
  set_tiles(m0, m1);
  const bf16 *b0 = w.at(nb * 2, 0), *b1 = w.at(nb * 2 + 1, 0);
  const size_t stride = size_t(lda) * 2;
  _tile_zero(0);
  _tile_zero(1);
  if (m1) {
    _tile_zero(2);
    _tile_zero(3);
    for (int s = 0; s < steps; ++s) {
      _tile_loadd(4, a + s * 32, stride);
      _tile_loadd(6, b0 + s * 512, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b1 + s * 512, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a + size_t(16) * lda + s * 32, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(2, c + 16 * NB, NB * 4);
    _tile_stored(3, c + 16 * NB + 16, NB * 4);
  } else {
    for (int s = 0; s < steps; ++s) {
      _mm_prefetch((const char*)(b0 + (s + 4) * 512), _MM_HINT_T0);
      _mm_prefetch((const char*)(b1 + (s + 4) * 512), _MM_HINT_T0);
      _tile_loadd(4, a + s * 32, stride);
      _tile_loadd(6, b0 + s * 512, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b1 + s * 512, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
  }
  _tile_stored(0, c, NB * 4);
  _tile_stored(1, c + 16, NB * 4);
#elif defined(PB_AVX512)
  const bf16 *b0 = w.at(nb * 2, 0), *b1 = w.at(nb * 2 + 1, 0);
  for (int r = 0; r < m; r += 8) {
    const int rows = std::min(8, m - r);
    __m512 s0[8], s1[8];
    for (int i = 0; i < 8; ++i) s0[i] = s1[i] = _mm512_setzero_ps();
    for (int p = 0; p < steps * 16; ++p) {
      const __m512bh x = (__m512bh)_mm512_loadu_si512(b0 + p * 32), y = (__m512bh)_mm512_loadu_si512(b1 + p * 32);
      for (int i = 0; i < 8; ++i) {
        if (i >= rows) break;
        int32_t pair;
        memcpy(&pair, a + size_t(r + i) * lda + p * 2, 4);
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
  memset(c, 0, sizeof(float) * MB * NB);
  for (int half = 0; half < 2; ++half)
    for (int p = 0; p < steps * 16; ++p) {
      const bf16* pairs = w.at(nb * 2 + half, 0) + p * 32;
      float even[16], odd[16];
      for (int j = 0; j < 16; ++j) even[j] = to_float(pairs[j * 2]), odd[j] = to_float(pairs[j * 2 + 1]);
      for (int i = 0; i < m; ++i) {
        const float x = to_float(a[size_t(i) * lda + p * 2]), y = to_float(a[size_t(i) * lda + p * 2 + 1]);
        float* sum = c + i * NB + half * 16;
        for (int j = 0; j < 16; ++j) sum[j] += x * even[j] + y * odd[j];
      }
    }
#endif
}

// Every block of a[m, k] * w^T goes to `done(row, rows, block of 32 columns, sums)`.
template <class F>
void product(Shared work, const bf16* a, int lda, int m, const Matrix& w, float* c, F&& done) {
  int from, to;
  while (work.take(from, to))
    for (int nb = from; nb < to; ++nb)
      for (int r = 0; r < m; r += MB) {
        const int rows = std::min(MB, m - r);
        block(a + size_t(r) * lda, lda, rows, w, nb, c);
        done(r, rows, nb, c);
      }
}

}  // namespace
