// Attention over paged KV.
#pragma once

#include "model.h"

namespace {

// Attention of one new token of request r for the query heads of one KV head.
void attend_one(const Model& m, const PbBatch& b, int l, int r, int kvh, ThreadSpace& space) {
  const Layer& layer = m.layers[l];
  const PbShape& s = m.s;
  const int dim = s.head_dim, g = m.group(), t = int(b.starts[r]), len = int(b.seq_lens[r]);
  const int begin = layer.window ? std::max(0, len - layer.window) : 0, n = len - begin, n_pad = round_up(n, 16);
  const int32_t* slots = b.table + b.rows[r] * b.table_stride + begin;
  const size_t stride = size_t(s.kv_heads) * dim;
  const bf16 *keys = b.keys[l] + size_t(kvh) * dim, *values = b.values[l] + size_t(kvh) * dim;
  const float* q = m.qkv.p + size_t(t) * m.layers[0].qkv.n_pad + size_t(kvh) * g * dim;
  float* scores = space.scores.need(size_t(g) * n_pad);
  float* sums = space.sums.need(size_t(g) * dim);
#if defined(PB_AMX)
  if (g <= 16 && dim % 32 == 0) {
    // Keys are the left side, 16 tokens at a time; queries, as columns, the right one.
    bf16* right = space.q.need(size_t(dim) * 16);
    memset(right, 0, size_t(dim) * 32);
    for (int i = 0; i < g; ++i)
      for (int d = 0; d < dim; ++d) right[((d / 2) * 16 + i) * 2 + (d & 1)] = to_bf16(q[i * dim + d] * s.scale);
    bf16* copy = space.k.need(size_t(16) * dim);
    float* c = space.c.need(MB * NB);
    set_tiles(16, 0);
    const __m512i columns = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                               _mm512_set1_epi32(16));
    for (int j = 0; j < n; j += 16) {
      const int count = std::min(16, n - j);
      const bf16* left = copy;
      size_t left_stride = size_t(dim) * 2;
      bool together = count == 16;
      for (int i = 1; together && i < 16; ++i) together = slots[j + i] == slots[j] + i;
      if (together) {
        left = keys + slots[j] * stride;
        left_stride = stride * 2;
      } else {
        for (int i = 0; i < count; ++i) memcpy(copy + size_t(i) * dim, keys + slots[j + i] * stride, size_t(dim) * 2);
      }
      _tile_zero(0);
      for (int d = 0; d < dim; d += 32) {
        _tile_loadd(4, left + d, left_stride);
        _tile_loadd(6, right + size_t(d) * 16, 64);
        _tile_dpbf16ps(0, 4, 6);
      }
      _tile_stored(0, c, 64);
      for (int i = 0; i < g; ++i)
        _mm512_storeu_ps(scores + size_t(i) * n_pad + j, _mm512_i32gather_ps(columns, c + i, 4));
    }
  } else
#endif
  {
    for (int j = 0; j < n; ++j) {
      const bf16* k = keys + slots[j] * stride;
      for (int i = 0; i < g; ++i) {
        const float* head = q + i * dim;
        float sum = 0;
        for (int d = 0; d < dim; ++d) sum += head[d] * to_float(k[d]);
        scores[size_t(i) * n_pad + j] = sum * s.scale;
      }
    }
  }
  float* total = space.probs_f.need(size_t(g));
  for (int i = 0; i < g; ++i) {
    float* row = scores + size_t(i) * n_pad;
    for (int j = n; j < n_pad; ++j) row[j] = -INFINITY;
    float best = -INFINITY, sum = 0;
#ifdef PB_AVX512
    __m512 top = _mm512_set1_ps(-INFINITY), acc = _mm512_setzero_ps();
    for (int j = 0; j < n_pad; j += 16) top = _mm512_max_ps(top, _mm512_loadu_ps(row + j));
    best = _mm512_reduce_max_ps(top);
    const __m512 shift = _mm512_set1_ps(best);
    for (int j = 0; j < n_pad; j += 16) {
      __m512 e = exp512(_mm512_sub_ps(_mm512_loadu_ps(row + j), shift));
      if (j + 16 > n) e = _mm512_maskz_mov_ps(__mmask16((1u << (n - j)) - 1), e);
      _mm512_storeu_ps(row + j, e);
      acc = _mm512_add_ps(acc, e);
    }
    sum = _mm512_reduce_add_ps(acc);
#else
    for (int j = 0; j < n; ++j) best = std::max(best, row[j]);
    for (int j = 0; j < n; ++j) sum += row[j] = std::exp(row[j] - best);
#endif
    total[i] = sum;
  }
  bf16* out = m.attended.p + size_t(t) * m.layers[0].o.k_pad + size_t(kvh) * g * dim;
#ifdef PB_AVX512
  if (dim % 16 == 0) {
    for (int i0 = 0; i0 < g; i0 += 4)
      for (int d0 = 0; d0 < dim; d0 += 64) {
        const int heads = std::min(4, g - i0), parts = std::min(64, dim - d0) / 16;
        __m512 acc[4][4];
        for (auto& row : acc)
          for (auto& one : row) one = _mm512_setzero_ps();
        for (int j = 0; j < n; ++j) {
          const bf16* v = values + slots[j] * stride + d0;
          if (j + 8 < n) _mm_prefetch((const char*)(values + slots[j + 8] * stride + d0), _MM_HINT_T0);
          __m512 part[4];
          for (int p = 0; p < 4; ++p)
            if (p < parts)
              part[p] = _mm512_castsi512_ps(
                  _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(v + p * 16))), 16));
          for (int i = 0; i < 4; ++i) {
            if (i >= heads) break;
            const __m512 weight = _mm512_set1_ps(scores[size_t(i0 + i) * n_pad + j]);
            for (int p = 0; p < 4; ++p)
              if (p < parts) acc[i][p] = _mm512_fmadd_ps(weight, part[p], acc[i][p]);
          }
        }
        for (int i = 0; i < heads; ++i) {
          const __m512 factor = _mm512_set1_ps(1.0f / total[i0 + i]);
          for (int p = 0; p < parts; ++p)
            _mm256_storeu_si256((__m256i*)(out + (i0 + i) * dim + d0 + p * 16),
                                (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(acc[i][p], factor)));
        }
      }
    return;
  }
#endif
  for (int i = 0; i < g; ++i) {
    float* sum = sums + i * dim;
    memset(sum, 0, sizeof(float) * dim);
    for (int j = 0; j < n; ++j) {
      const bf16* v = values + slots[j] * stride;
      const float weight = scores[size_t(i) * n_pad + j];
      for (int d = 0; d < dim; ++d) sum[d] += weight * to_float(v[d]);
    }
    for (int d = 0; d < dim; ++d) out[i * dim + d] = to_bf16(sum[d] / total[i]);
  }
}

// The same of new tokens [first, first + count) of request r, one after the other; blockwise with tiles.
void attend_block(const Model& m, const PbBatch& b, int l, int r, int kvh, int first, int count, ThreadSpace& space) {
  const Layer& layer = m.layers[l];
  const PbShape& s = m.s;
  const int dim = s.head_dim, g = m.group(), t0 = int(b.starts[r]) + first;
  const int before = int(b.seq_lens[r]) - int(b.starts[r + 1] - b.starts[r]);
  const int32_t* slots = b.table + b.rows[r] * b.table_stride;
  const size_t stride = size_t(s.kv_heads) * dim;
  const bf16 *keys = b.keys[l] + size_t(kvh) * dim, *values = b.values[l] + size_t(kvh) * dim;
  const int ldq = m.layers[0].qkv.n_pad, ldo = m.layers[0].o.k_pad;
  const int rows = count * g;  // (token, head), token by token
  const int last = before + first + count - 1;  // position of the newest of these tokens
#if defined(PB_AMX)
  const int begin = layer.window ? std::max(0, before + first - layer.window + 1) : 0;
  constexpr int SB = 128;  // tokens of the context at a time
  if (rows <= MB && dim % 32 == 0) {
    bf16* q = space.q.need(size_t(MB) * dim);
    float* sums = space.sums.need(size_t(MB) * dim);
    float* scores = space.scores.need(size_t(MB) * SB);
    bf16* probs = space.probs.need(size_t(MB) * SB);
    bf16* tiles = space.k.need(size_t(SB) * dim);
    float best[MB], total[MB];
    const int m0 = std::min(rows, 16), m1 = rows - m0;
    for (int i = 0; i < rows; ++i) {
      const float* from = m.qkv.p + size_t(t0 + i / g) * ldq + size_t(kvh * g + i % g) * dim;
      for (int d = 0; d < dim; ++d) q[size_t(i) * dim + d] = to_bf16(from[d] * s.scale);
      best[i] = -INFINITY;
      total[i] = 0;
    }
    memset(sums, 0, sizeof(float) * rows * dim);
    for (int j0 = begin / SB * SB; j0 <= last; j0 += SB) {
      const int n = std::min(SB, last + 1 - j0), n32 = round_up(n, 32);
      // Keys, transposed: per 16 tokens and 32 dimensions a tile of [16 pairs of dimensions, 16 tokens].
      for (int j = 0; j < n32; j += 16)
        for (int d = 0; d < dim; d += 32) {
          alignas(64) uint32_t rows16[16][16];
          for (int i = 0; i < 16; ++i) {
            if (j0 + j + i <= last)
              memcpy(rows16[i], keys + slots[j0 + j + i] * stride + d, 64);
            else
              memset(rows16[i], 0, 64);
          }
          uint32_t* tile = reinterpret_cast<uint32_t*>(tiles + (size_t(j / 16) * (dim / 32) + d / 32) * 512);
          const __m512i at = _mm512_mullo_epi32(
              _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(16));
          for (int p = 0; p < 16; ++p)
            _mm512_store_si512(tile + p * 16, _mm512_i32gather_epi32(at, reinterpret_cast<const int*>(&rows16[0][p]), 4));
        }
      set_tiles(m0, m1);
      for (int j = 0; j < n32; j += 32) {
        for (int tile = 0; tile < 4; ++tile) {
          if (tile == 0) _tile_zero(0);
          if (tile == 1) _tile_zero(1);
          if (tile == 2) _tile_zero(2);
          if (tile == 3) _tile_zero(3);
        }
        for (int d = 0; d < dim; d += 32) {
          _tile_loadd(4, q + d, size_t(dim) * 2);
          _tile_loadd(6, tiles + (size_t(j / 16) * (dim / 32) + d / 32) * 512, 64);
          _tile_loadd(7, tiles + (size_t(j / 16 + 1) * (dim / 32) + d / 32) * 512, 64);
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 4, 7);
          if (m1) {
            _tile_loadd(5, q + size_t(16) * dim + d, size_t(dim) * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
          }
        }
        _tile_stored(0, scores + j, SB * 4);
        _tile_stored(1, scores + j + 16, SB * 4);
        if (m1) {
          _tile_stored(2, scores + size_t(16) * SB + j, SB * 4);
          _tile_stored(3, scores + size_t(16) * SB + j + 16, SB * 4);
        }
      }
      for (int i = 0; i < rows; ++i) {
        float* row = scores + size_t(i) * SB;
        const int position = before + first + i / g;
        const int stop = std::min(n, position + 1 - j0);
        const int start = layer.window ? std::max(0, position - layer.window + 1 - j0) : std::max(0, begin - j0);
        for (int j = 0; j < std::min(start, n32); ++j) row[j] = -INFINITY;
        for (int j = std::max(stop, 0); j < n32; ++j) row[j] = -INFINITY;
        __m512 top = _mm512_set1_ps(best[i]);
        for (int j = 0; j < n32; j += 16) top = _mm512_max_ps(top, _mm512_loadu_ps(row + j));
        const float peak = _mm512_reduce_max_ps(top);
        bf16* p = probs + size_t(i) * SB;
        if (peak == -INFINITY) {
          memset(p, 0, sizeof(bf16) * n32);
          continue;
        }
        const __m512 shift = _mm512_set1_ps(peak);
        __m512 acc = _mm512_setzero_ps();
        for (int j = 0; j < n32; j += 16) {
          const __m512 score = _mm512_loadu_ps(row + j);
          const __mmask16 real = _mm512_cmp_ps_mask(score, _mm512_set1_ps(-INFINITY), _CMP_NEQ_OQ);
          const __m512 e = _mm512_maskz_mov_ps(real, exp512(_mm512_sub_ps(score, shift)));
          const __m256bh rounded = _mm512_cvtneps_pbh(e);
          _mm256_storeu_si256((__m256i*)(p + j), (__m256i)rounded);
          acc = _mm512_add_ps(acc, e);
        }
        const float keep = best[i] == -INFINITY ? 0.0f : std::exp(best[i] - peak);
        total[i] = total[i] * keep + _mm512_reduce_add_ps(acc);
        best[i] = peak;
        if (keep != 1.0f) {
          const __m512 factor = _mm512_set1_ps(keep);
          for (int d = 0; d < dim; d += 16)
            _mm512_storeu_ps(sums + size_t(i) * dim + d, _mm512_mul_ps(_mm512_loadu_ps(sums + size_t(i) * dim + d), factor));
        }
      }
      // Values: per 32 tokens and 16 dimensions a tile of [16 pairs of tokens, 16 dimensions].
      for (int j = 0; j < n32; j += 2) {
        const bool one = j0 + j <= last, two = j0 + j + 1 <= last;
        const bf16* v0 = one ? values + slots[j0 + j] * stride : nullptr;
        const bf16* v1 = two ? values + slots[j0 + j + 1] * stride : nullptr;
        for (int d = 0; d < dim; d += 16) {
          const __m512i low = v0 ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(v0 + d))) : _mm512_setzero_si512();
          const __m512i high = v1 ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(v1 + d))) : _mm512_setzero_si512();
          bf16* tile = tiles + (size_t(j / 32) * (dim / 16) + d / 16) * 512;
          _mm512_store_si512(tile + (j % 32 / 2) * 32, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
      }
      for (int d = 0; d < dim; d += 32) {
        // The sums so far are where the tiles begin.
        _tile_loadd(0, sums + d, size_t(dim) * 4);
        _tile_loadd(1, sums + d + 16, size_t(dim) * 4);
        if (m1) {
          _tile_loadd(2, sums + size_t(16) * dim + d, size_t(dim) * 4);
          _tile_loadd(3, sums + size_t(16) * dim + d + 16, size_t(dim) * 4);
        }
        for (int j = 0; j < n32; j += 32) {
          _tile_loadd(4, probs + j, SB * 2);
          _tile_loadd(6, tiles + (size_t(j / 32) * (dim / 16) + d / 16) * 512, 64);
          _tile_loadd(7, tiles + (size_t(j / 32) * (dim / 16) + d / 16 + 1) * 512, 64);
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 4, 7);
          if (m1) {
            _tile_loadd(5, probs + size_t(16) * SB + j, SB * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
          }
        }
        _tile_stored(0, sums + d, size_t(dim) * 4);
        _tile_stored(1, sums + d + 16, size_t(dim) * 4);
        if (m1) {
          _tile_stored(2, sums + size_t(16) * dim + d, size_t(dim) * 4);
          _tile_stored(3, sums + size_t(16) * dim + d + 16, size_t(dim) * 4);
        }
      }
    }
    for (int i = 0; i < rows; ++i) {
      bf16* out = m.attended.p + size_t(t0 + i / g) * ldo + size_t(kvh * g + i % g) * dim;
      const __m512 factor = _mm512_set1_ps(1.0f / total[i]);
      for (int d = 0; d < dim; d += 16)
        _mm256_storeu_si256((__m256i*)(out + d), (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(
                                                     _mm512_loadu_ps(sums + size_t(i) * dim + d), factor)));
    }
    return;
  }
#endif
  float* scores = space.probs_f.need(size_t(last + 1));
  float* sums = space.sums.need(size_t(dim));
  for (int i = 0; i < rows; ++i) {
    const float* q = m.qkv.p + size_t(t0 + i / g) * ldq + size_t(kvh * g + i % g) * dim;
    const int position = before + first + i / g;
    const int start = layer.window ? std::max(0, position - layer.window + 1) : 0;
    float best = -INFINITY, total = 0;
    for (int j = start; j <= position; ++j) {
      const bf16* k = keys + slots[j] * stride;
      float sum = 0;
      for (int d = 0; d < dim; ++d) sum += q[d] * to_float(k[d]);
      scores[j] = sum * s.scale;
      best = std::max(best, scores[j]);
    }
    memset(sums, 0, sizeof(float) * dim);
    for (int j = start; j <= position; ++j) {
      const float weight = std::exp(scores[j] - best);
      const bf16* v = values + slots[j] * stride;
      total += weight;
      for (int d = 0; d < dim; ++d) sums[d] += weight * to_float(v[d]);
    }
    bf16* out = m.attended.p + size_t(t0 + i / g) * ldo + size_t(kvh * g + i % g) * dim;
    for (int d = 0; d < dim; ++d) out[d] = to_bf16(sums[d] / total);
  }
}

}  // namespace
