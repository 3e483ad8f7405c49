// Attention of blocks of queries with blocks of keys.
//
// Heads are padded with zeros to `dp`, a multiple of 32. Keys are packed like weights: per 16 keys and 32 dimensions a
// tile of 16 pairs of dimensions x 16 keys x 2; values per 32 keys and 16 dimensions one of 16 pairs of keys x 16
// dimensions x 2. Up to the next multiple of 32 keys there are zeros: nothing is read that is not the request's own.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include <immintrin.h>

#include "blocks.h"
#include "numbers.h"
#include "tiles.h"

namespace {

constexpr int KEYS = 128;  // at a time: their scores and weights, and 32 queries, stay in the first level's cache

#ifdef PB_AVX512
// 2^x for x <= 0, relative error below 3e-6; exactly 0 for -inf, and 0 or next to it below -126.
inline __m512 exp2_512(__m512 x) {
  // Adding 1.5 * 2^23 rounds to a whole number, which then stands in the lowest bits, ready for the exponent's.
  const __m512 magic = _mm512_set1_ps(12582912.0f);
  x = _mm512_max_ps(x, _mm512_set1_ps(-127.0f));
  const __m512 t = _mm512_add_ps(x, magic), f = _mm512_sub_ps(x, _mm512_sub_ps(t, magic));
  __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(9.582853220e-3f), f, _mm512_set1_ps(5.590642621e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.402409862e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.931241932e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), _mm512_slli_epi32(_mm512_castps_si512(t), 23)));
}

// The first `n` of 32 numbers are there.
inline __mmask32 first_of_32(int n) { return n >= 32 ? ~__mmask32(0) : (__mmask32(1) << n) - 1; }
#endif

inline void pack_keys(const bf16* keys, size_t stride, const int32_t* slots, int n, int dim, bf16* tiles) {
  const int dp = round_up(dim, 32);
  for (int j = 0; j < round_up(n, 32); j += 16)
    for (int d = 0; d < dp; d += 32, tiles += 512) {
#ifdef PB_AVX512
      const __mmask32 real = first_of_32(dim - d);
      __m512i rows[16];
      for (int i = 0; i < 16; ++i)
        rows[i] = j + i < n ? _mm512_maskz_loadu_epi16(real, keys + slots[j + i] * stride + d) : _mm512_setzero_si512();
      transpose16(rows);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(tiles + i * 32, rows[i]);
#else
      memset(tiles, 0, 512 * sizeof(bf16));
      for (int i = 0; i < 16 && j + i < n; ++i) {
        const bf16* key = keys + slots[j + i] * stride + d;
        for (int e = 0; e < std::min(32, dim - d); ++e) tiles[(e / 2 * 16 + i) * 2 + e % 2] = key[e];
      }
#endif
    }
}

inline void pack_values(const bf16* values, size_t stride, const int32_t* slots, int n, int dim, bf16* tiles) {
  const int dp = round_up(dim, 32);
  for (int j = 0; j < n; j += 32, tiles += 32 * dp)
    for (int p = 0; p < 16; ++p) {
      const int at = j + p * 2;
      const bf16* even = at < n ? values + slots[at] * stride : nullptr;
      const bf16* odd = at + 1 < n ? values + slots[at + 1] * stride : nullptr;
      for (int d = 0; d < dp; d += 16) {
        bf16* to = tiles + d / 16 * 512 + p * 32;
#ifdef PB_AVX512
        const __mmask16 real = __mmask16(first_of_32(std::max(0, std::min(16, dim - d))));
        const __m512i low =
            even ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(real, even + d)) : _mm512_setzero_si512();
        const __m512i high =
            odd ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(real, odd + d)) : _mm512_setzero_si512();
        _mm512_store_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
#else
        for (int e = 0; e < 16; ++e) {
          to[e * 2] = even && d + e < dim ? even[d + e] : bf16(0);
          to[e * 2 + 1] = odd && d + e < dim ? odd[d + e] : bf16(0);
        }
#endif
      }
    }
}

// scores[32][KEYS] of `rows` queries bf16 [32, dp] with keys [from, to) of a packed block, both multiples of 32.
inline void score_block(const bf16* q, int rows, int dp, const bf16* tiles, int from, int to, float* scores) {
  const int steps = dp / 32;
#if defined(PB_AMX)
  const size_t ldq = size_t(dp) * 2;
  set_tiles(16, 16);
  for (int j = from; j < to; j += 32) {
    const bf16 *k0 = tiles + size_t(j / 16) * steps * 512, *k1 = k0 + size_t(steps) * 512;
    _tile_zero(0);
    _tile_zero(1);
    if (rows > 16) {
      _tile_zero(2);
      _tile_zero(3);
      for (int s = 0; s < steps; ++s) {
        _tile_loadd(4, q + s * 32, ldq);
        _tile_loadd(6, k0 + s * 512, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, k1 + s * 512, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, q + size_t(16) * dp + s * 32, ldq);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(2, scores + 16 * KEYS + j, KEYS * 4);
      _tile_stored(3, scores + 16 * KEYS + j + 16, KEYS * 4);
    } else {
      for (int s = 0; s < steps; ++s) {
        _tile_loadd(4, q + s * 32, ldq);
        _tile_loadd(6, k0 + s * 512, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, k1 + s * 512, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
    }
    _tile_stored(0, scores + j, KEYS * 4);
    _tile_stored(1, scores + j + 16, KEYS * 4);
  }
#else
  for (int j = from; j < to; j += 32) {
    const Tiles keys{tiles + size_t(j / 16) * steps * 512, size_t(steps) * 512, 512};
    for (int r = 0; r < rows; r += 8) {
      const Rows queries{q + size_t(r) * dp, size_t(dp), 32};
      some_rows(std::min(8, rows - r), queries, keys, steps, scores + r * KEYS + j, KEYS, false);
    }
  }
#endif
}

// sums float [32, dp] += weights bf16 [32][KEYS] * values [from, to) of a packed block.
inline void weigh_block(const bf16* weights, int rows, int dp, const bf16* tiles, int from, int to, float* sums) {
  const int columns = dp / 16;
#if defined(PB_AMX)
  const size_t lds = size_t(dp) * 4;
  set_tiles(16, 16);
  for (int d = 0; d < dp; d += 32) {
    _tile_loadd(0, sums + d, lds);
    _tile_loadd(1, sums + d + 16, lds);
    if (rows > 16) {
      _tile_loadd(2, sums + size_t(16) * dp + d, lds);
      _tile_loadd(3, sums + size_t(16) * dp + d + 16, lds);
    }
    for (int j = from; j < to; j += 32) {
      const bf16* v = tiles + (size_t(j / 32) * columns + d / 16) * 512;
      _tile_loadd(4, weights + j, KEYS * 2);
      _tile_loadd(6, v, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, v + 512, 64);
      _tile_dpbf16ps(1, 4, 7);
      if (rows > 16) {
        _tile_loadd(5, weights + 16 * KEYS + j, KEYS * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, sums + d, lds);
    _tile_stored(1, sums + d + 16, lds);
    if (rows > 16) {
      _tile_stored(2, sums + size_t(16) * dp + d, lds);
      _tile_stored(3, sums + size_t(16) * dp + d + 16, lds);
    }
  }
#else
  for (int d = 0; d < dp; d += 32) {
    const Tiles values{tiles + (size_t(from / 32) * columns + d / 16) * 512, 512, size_t(columns) * 512};
    for (int r = 0; r < rows; r += 8) {
      const Rows some{weights + r * KEYS + from, KEYS, 32};
      some_rows(std::min(8, rows - r), some, values, (to - from) / 32, sums + size_t(r) * dp + d, size_t(dp), true);
    }
  }
#endif
}

// Scores [from, to) of up to 32 queries become weights relative to each one's largest score so far; what has been
// summed up under a smaller one shrinks. All largest scores first, then all weights: there is no waiting for one
// query's.
inline void soften(float* scores, int rows, int from, int to, int dp, bf16* weights, float* best, float* total,
                   float* sums) {
  alignas(64) float peak[32], kept[32];
#ifdef PB_AVX512
  for (int i = 0; i < rows; ++i) {
    const float* row = scores + i * KEYS;
    __m512 top = _mm512_loadu_ps(row + from), other = _mm512_loadu_ps(row + from + 16);
    for (int j = from + 32; j < to; j += 32) {
      top = _mm512_max_ps(top, _mm512_loadu_ps(row + j));
      other = _mm512_max_ps(other, _mm512_loadu_ps(row + j + 16));
    }
    peak[i] = _mm512_reduce_max_ps(_mm512_max_ps(top, other));
  }
  for (int i = rows; i < round_up(rows, 16); ++i) peak[i] = -INFINITY;
  bool changed = false;
  for (int i = 0; i < rows; i += 16) {
    const __m512 before = _mm512_loadu_ps(best + i), now = _mm512_max_ps(before, _mm512_load_ps(peak + i));
    // Nothing to see so far: scores of -inf, less nothing, and weights of 0.
    const __mmask16 nothing = _mm512_cmp_ps_mask(now, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
    const __m512 factor = exp2_512(_mm512_sub_ps(before, now));
    changed |= _mm512_cmp_ps_mask(before, now, _CMP_NEQ_UQ) != 0;
    _mm512_storeu_ps(best + i, now);
    _mm512_store_ps(peak + i, _mm512_mask_mov_ps(now, nothing, _mm512_setzero_ps()));
    _mm512_store_ps(kept + i, factor);
    _mm512_storeu_ps(total + i, _mm512_mul_ps(_mm512_loadu_ps(total + i), factor));
  }
  for (int i = 0; i < rows; ++i) {
    const float* row = scores + i * KEYS;
    bf16* to_row = weights + i * KEYS;
    const __m512 shift = _mm512_set1_ps(peak[i]);
    __m512 acc = _mm512_setzero_ps(), other = acc;
    for (int j = from; j < to; j += 32) {
      const __m512 low = exp2_512(_mm512_sub_ps(_mm512_loadu_ps(row + j), shift));
      const __m512 high = exp2_512(_mm512_sub_ps(_mm512_loadu_ps(row + j + 16), shift));
      acc = _mm512_add_ps(acc, low);
      other = _mm512_add_ps(other, high);
      _mm512_storeu_si512(to_row + j, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
    total[i] += _mm512_reduce_add_ps(_mm512_add_ps(acc, other));
  }
  if (changed)
    for (int i = 0; i < rows; ++i) {
      const __m512 factor = _mm512_set1_ps(kept[i]);
      float* sum = sums + size_t(i) * dp;
      for (int d = 0; d < dp; d += 16) _mm512_storeu_ps(sum + d, _mm512_mul_ps(_mm512_loadu_ps(sum + d), factor));
    }
#else
  for (int i = 0; i < rows; ++i) {
    const float* row = scores + i * KEYS;
    peak[i] = best[i];
    for (int j = from; j < to; ++j) peak[i] = std::max(peak[i], row[j]);
    if (peak[i] == -INFINITY) {  // nothing to see so far
      memset(weights + i * KEYS + from, 0, sizeof(bf16) * (to - from));
      continue;
    }
    kept[i] = std::exp2(best[i] - peak[i]);
    best[i] = peak[i];
    total[i] *= kept[i];
    for (int j = from; j < to; ++j) {
      const float e = std::exp2(row[j] - peak[i]);
      weights[i * KEYS + j] = to_bf16(e);
      total[i] += e;
    }
    if (kept[i] != 1.0f)
      for (int d = 0; d < dp; ++d) sums[size_t(i) * dp + d] *= kept[i];
  }
#endif
}

}  // namespace
