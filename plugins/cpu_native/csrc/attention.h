// Attention over paged KV. Scores are in powers of two: log2(e) is in the queries' scale.
#pragma once

#include <climits>

#include "model.h"
#include "plan.h"

namespace {

constexpr int KEYS = 128;  // at a time: their scores and weights, and 32 queries, stay in the first level's cache
constexpr float LOG2E = 1.44269504f;

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
  return _mm512_castsi512_ps(
      _mm512_add_epi32(_mm512_castps_si512(y), _mm512_slli_epi32(_mm512_castps_si512(t), 23)));
}

// The first `n` of 32 numbers are there.
inline __mmask32 first_of_32(int n) { return n >= 32 ? ~__mmask32(0) : (__mmask32(1) << n) - 1; }
#endif

// ---- blocks of queries with blocks of keys -----------------------------------------------------------------------------
//
// Heads are padded with zeros to `dp`, a multiple of 32. Keys are packed like weights: per 16 keys and 32 dimensions a tile
// of 16 pairs of dimensions x 16 keys x 2; values per 32 keys and 16 dimensions one of 16 pairs of keys x 16 dimensions x 2.
// Up to the next multiple of 32 keys there are zeros: nothing is read that is not the request's own.

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
        const __m512i low = even ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(real, even + d)) : _mm512_setzero_si512();
        const __m512i high = odd ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(real, odd + d)) : _mm512_setzero_si512();
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
#elif defined(PB_AVX512)
  for (int j = from; j < to; j += 32) {
    const bf16* k0 = tiles + size_t(j / 16) * steps * 512;
    for (int r = 0; r < rows; r += 8)
      some_rows(std::min(8, rows - r), {q + size_t(r) * dp, size_t(dp), 32}, {k0, size_t(steps) * 512, 512}, steps, scores + r * KEYS + j, KEYS, false);
  }
#else
  for (int j = from; j < to; j += 16) {
    const bf16* k = tiles + size_t(j / 16) * steps * 512;
    for (int r = 0; r < rows; ++r) memset(scores + r * KEYS + j, 0, 16 * sizeof(float));
    for (int p = 0; p < dp / 2; ++p, k += 32) {
      float even[16], odd[16];
      for (int i = 0; i < 16; ++i) even[i] = to_float(k[i * 2]), odd[i] = to_float(k[i * 2 + 1]);
      for (int r = 0; r < rows; ++r) {
        const float x = to_float(q[size_t(r) * dp + p * 2]), y = to_float(q[size_t(r) * dp + p * 2 + 1]);
        float* to_row = scores + r * KEYS + j;
        for (int i = 0; i < 16; ++i) to_row[i] += x * even[i] + y * odd[i];
      }
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
#elif defined(PB_AVX512)
  for (int d = 0; d < dp; d += 32) {
    const bf16* v = tiles + (size_t(from / 32) * columns + d / 16) * 512;
    for (int r = 0; r < rows; r += 8)
      some_rows(std::min(8, rows - r), {weights + r * KEYS + from, KEYS, 32}, {v, 512, size_t(columns) * 512}, (to - from) / 32,
                sums + size_t(r) * dp + d, size_t(dp), true);
  }
#else
  for (int d = 0; d < dp; d += 16)
    for (int j = from; j < to; j += 2) {
      const bf16* v = tiles + (size_t(j / 32) * columns + d / 16) * 512 + j % 32 * 16;
      float even[16], odd[16];
      for (int i = 0; i < 16; ++i) even[i] = to_float(v[i * 2]), odd[i] = to_float(v[i * 2 + 1]);
      for (int r = 0; r < rows; ++r) {
        const float x = to_float(weights[r * KEYS + j]), y = to_float(weights[r * KEYS + j + 1]);
        float* to_row = sums + size_t(r) * dp + d;
        for (int i = 0; i < 16; ++i) to_row[i] += x * even[i] + y * odd[i];
      }
    }
#endif
}

// Scores [from, to) of up to 32 queries become weights relative to each one's largest score so far; what has been summed up
// under a smaller one shrinks. All largest scores first, then all weights: there is no waiting for one query's.
inline void soften(float* scores, int rows, int from, int to, int dp, bf16* weights, float* best, float* total, float* sums) {
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

// ---- one query per head ------------------------------------------------------------------------------------------------
//
// Keys and values are read where they are, all KV heads of a slot together, and each once. Scores are [keys][16 columns],
// a column per query head: with tiles, keys are the left side of a product whose right side is made of the queries, and
// the softmax of 16 heads needs neither a transposition nor a sum across lanes.

constexpr int COLUMNS = 16;
constexpr int BITE = 16;  // keys at a time: few, so that asking for the next ones is spread over all there is to do

// Asks memory for the keys and values of the next bite while this one is worked on, line by line in the order in which they
// lie, a line of both in turn. A core waits for a dozen lines or so at a time, whoever asked for them; lines that follow each
// other make the second level's own prefetcher join in, and that one waits for more.
class Ahead {
 public:
  // Values and keys of slot 0, and how many bytes of each slot are read there; slots are `stride` numbers apart.
  Ahead(const bf16* values, const bf16* keys, size_t stride, size_t bytes)
      : base_((const char*)values), to_keys_((const char*)keys - base_), stride_(stride * sizeof(bf16)), bytes_(bytes) {}

  // What comes next: n slots.
  void begin(const int32_t* slots, int n) {
    slots_ = slots;
    left_ = n * lines_of_slot();
    line_ = 0;
    if (n > 0) at_ = base_ + size_t(*slots) * stride_;
  }

  int lines_of_slot() const { return int((bytes_ + 63) / 64); }

  void ask(int lines) {
    for (; lines > 0 && left_ > 0; --lines, --left_) {
      _mm_prefetch(at_ + line_, _MM_HINT_T0);
      _mm_prefetch(at_ + line_ + to_keys_, _MM_HINT_T0);
      line_ += 64;
      if (line_ < bytes_) continue;
      line_ = 0;
      if (left_ > 1) at_ = base_ + size_t(*++slots_) * stride_;
    }
  }

 private:
  const char* base_;
  ptrdiff_t to_keys_;
  size_t stride_, bytes_, line_ = 0;
  const char* at_ = nullptr;
  const int32_t* slots_ = nullptr;
  int left_ = 0;
};

#ifdef PB_AVX512
// sums[H heads][dims] += weight * value, for P pairs of 16 dimensions: even ones in one register, odd ones in another.
template <int H, int P>
inline void weigh_some(const bf16* values, size_t stride, const int32_t* slots, int n, const __mmask32* real,
                       const float* weights, float* sums, int dp, int lines, Ahead& ahead) {
  const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
  __m512 acc[H][P][2];
  for (int i = 0; i < H; ++i)
    for (int p = 0; p < P; ++p)
      for (int o = 0; o < 2; ++o) acc[i][p][o] = _mm512_loadu_ps(sums + size_t(i) * dp + p * 32 + o * 16);
  for (int j = 0; j < n; ++j) {
    const bf16* v = values + slots[j] * stride;
    ahead.ask(lines);
    for (int p = 0; p < P; ++p) {
      const __m512i both = _mm512_maskz_loadu_epi16(real[p], v + p * 32);
      const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
      const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(both, upper));
      for (int i = 0; i < H; ++i) {
        const __m512 weight = _mm512_set1_ps(weights[j * COLUMNS + i]);
        acc[i][p][0] = _mm512_fmadd_ps(weight, even, acc[i][p][0]);
        acc[i][p][1] = _mm512_fmadd_ps(weight, odd, acc[i][p][1]);
      }
    }
  }
  for (int i = 0; i < H; ++i)
    for (int p = 0; p < P; ++p)
      for (int o = 0; o < 2; ++o) _mm512_storeu_ps(sums + size_t(i) * dp + p * 32 + o * 16, acc[i][p][o]);
}

template <int P>
inline void weigh_heads(int heads, const bf16* values, size_t stride, const int32_t* slots, int n, const __mmask32* real,
                        const float* weights, float* sums, int dp, int lines, Ahead& ahead) {
  switch (heads) {
    case 1: return weigh_some<1, P>(values, stride, slots, n, real, weights, sums, dp, lines, ahead);
    case 2: return weigh_some<2, P>(values, stride, slots, n, real, weights, sums, dp, lines, ahead);
    case 3: return weigh_some<3, P>(values, stride, slots, n, real, weights, sums, dp, lines, ahead);
    default: return weigh_some<4, P>(values, stride, slots, n, real, weights, sums, dp, lines, ahead);
  }
}
#endif

// sums float [g][dp] of one KV head += weights [n][COLUMNS] * its values. Dimensions are in the order of `in_order`.
inline void weigh_values(const bf16* values, size_t stride, const int32_t* slots, int n, int g, int dim, int dp,
                         const float* weights, float* sums, Ahead& ahead) {
#ifdef PB_AVX512
  for (int d = 0; d < dp; d += 64) {
    const __mmask32 real[2] = {first_of_32(dim - d), first_of_32(std::max(0, dim - d - 32))};
    for (int i = 0; i < g; i += 4) {
      const int heads = std::min(4, g - i), lines = i == 0;
      float* to = sums + size_t(i) * dp + d;
      if (d + 32 < dp)
        weigh_heads<2>(heads, values + d, stride, slots, n, real, weights + i, to, dp, lines, ahead);
      else
        weigh_heads<1>(heads, values + d, stride, slots, n, real, weights + i, to, dp, lines, ahead);
    }
  }
#else
  (void)ahead;
  for (int j = 0; j < n; ++j) {
    const bf16* v = values + slots[j] * stride;
    for (int i = 0; i < g; ++i) {
      const float weight = weights[j * COLUMNS + i];
      float* sum = sums + size_t(i) * dp;
      for (int d = 0; d < dim; ++d) sum[d] += weight * to_float(v[d]);
    }
  }
#endif
}

// What `weigh_values` has summed up, dimension by dimension.
inline void in_order(float* sums, int dp) {
#ifdef PB_AVX512
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int d = 0; d < dp; d += 32) {
    const __m512 even = _mm512_loadu_ps(sums + d), odd = _mm512_loadu_ps(sums + d + 16);
    _mm512_storeu_ps(sums + d, _mm512_permutex2var_ps(even, low, odd));
    _mm512_storeu_ps(sums + d + 16, _mm512_permutex2var_ps(even, high, odd));
  }
#else
  (void)sums, (void)dp;
#endif
}

// ---- tasks -------------------------------------------------------------------------------------------------------------

class Attention {
 public:
  Attention(Model& m, const PbBatch& b, int layer, ThreadSpace& space)
      : m(m), b(b), space(space), dim(m.s.head_dim), dp(round_up(m.s.head_dim, 32)), g(m.group()),
        window(m.layers[layer].window), stride(size_t(m.s.kv_heads) * m.s.head_dim), keys(b.keys[layer]),
        values(b.values[layer]) {}

  // `next` is probably what this thread does next; null where nothing is left.
  void run(const Task& task, const Task* next) {
    if (task.count == 1)
      one(task, next);
    else
      many(task);
  }

  // Floats of one part of one query head: its largest score, the sum of its weights, and the sums of values.
  static size_t part_size(const PbShape& s) { return 16 + size_t(round_up(s.head_dim, 32)); }

 private:
  Model& m;
  const PbBatch& b;
  ThreadSpace& space;
  const int dim, dp, g, window;
  const size_t stride;
  const bf16 *const keys, *const values;

  const float* query(int t, int head) const { return m.qkv.p + size_t(t) * m.layers[0].qkv.n_pad + size_t(head) * dim; }
  const int32_t* slots(int request) const { return b.table + b.rows[request] * b.table_stride; }
  int first_seen(int position) const { return window ? std::max(0, position - window + 1) : 0; }

  void give_query(int t, int head, bf16* to) const {
    const float *from = query(t, head), scale = m.s.scale * LOG2E;
    int d = 0;
#ifdef PB_AVX512
    const __m512 by = _mm512_set1_ps(scale);
    for (; d + 16 <= dim; d += 16)
      _mm256_storeu_si256((__m256i*)(to + d), (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_loadu_ps(from + d), by)));
#endif
    for (; d < dim; ++d) to[d] = to_bf16(from[d] * scale);
    for (; d < dp; ++d) to[d] = 0;
  }

  void finish(int t, int head, const float* sums, float factor) const {
    const Left::Row to = Left(m.attended.p, m.q_size(), b.tokens).row(t);
    int d = 0;
#ifdef PB_AVX512
    const __m512 by = _mm512_set1_ps(factor);
    for (; dim % 16 == 0 && d < dim; d += 16)
      _mm256_storeu_si256((__m256i*)to.at(head * dim + d), (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_loadu_ps(sums + d), by)));
#endif
    for (; d < dim; ++d) *to.at(head * dim + d) = to_bf16(sums[d] * factor);
  }

  // What a task has found out for the g queries of token t with one KV head: all of it, or a part.
  void deliver(const Task& task, int t, int kvh, const float* sums, const float* best, const float* total) {
    const Plan& plan = m.plan;
    if (plan.parts[t] == 1) {
      for (int i = 0; i < g; ++i) finish(t, kvh * g + i, sums + size_t(i) * dp, 1.0f / total[i]);
      return;
    }
    const size_t size = part_size(m.s);
    for (int i = 0; i < g; ++i) {
      float* part = part_of(t, task.part, kvh * g + i);
      part[0] = best[i];
      part[1] = total[i];
      memcpy(part + 16, sums + size_t(i) * dp, (size - 16) * sizeof(float));
    }
    if (m.plan.last_part(t, kvh, m.s.kv_heads)) join(t, kvh);
  }

  float* part_of(int t, int part, int head) const {
    return m.parts.p + (size_t(m.plan.base[t] + part) * m.s.heads + head) * part_size(m.s);
  }

  void join(int t, int kvh) {
    const int parts = m.plan.parts[t];
    float* sums = space.joined.need(size_t(dp));
    for (int head = kvh * g; head < kvh * g + g; ++head) {
      float best = -INFINITY, total = 0;
      for (int p = 0; p < parts; ++p) best = std::max(best, part_of(t, p, head)[0]);
      memset(sums, 0, sizeof(float) * dp);
      for (int p = 0; p < parts; ++p) {
        const float* part = part_of(t, p, head);
        if (part[0] == -INFINITY) continue;  // a window has hidden all of it
        const float factor = std::exp2(part[0] - best);
        total += part[1] * factor;
        for (int d = 0; d < dp; ++d) sums[d] += part[16 + d] * factor;
      }
      finish(t, head, sums, 1.0f / total);
    }
  }

  void one(const Task& task, const Task* next);
  void many(const Task& task);
  void score_one(const int32_t* at, int n, int kvh, int heads, const bf16* q, float* scores, Ahead& ahead) const;
  void soften_one(float* scores, int n, int columns, float* best, float* total, float* sums, Ahead& ahead) const;
};

// scores [n up to a multiple of 16][COLUMNS] of `heads` KV heads' queries with n keys.
inline void Attention::score_one(const int32_t* at, int n, int kvh, int heads, const bf16* q, float* scores,
                                 Ahead& ahead) const {
  const bf16* first = keys + size_t(kvh) * dim;
#if defined(PB_AMX)
  const int steps = dp / 32;
  set_tiles(16, 16);
  for (int j = 0; j < n; j += 16) {
    const bf16* left = first + at[j] * stride;
    // Slots that follow each other in equal steps (a prompt's, or those of a batch that decodes) are a tile as they are.
    const int64_t step = n - j > 1 ? at[j + 1] - at[j] : 0;
    bool even = n - j >= 16 && dim == dp;
    for (int i = 2; even && i < 16; ++i) even = at[j + i] - at[j + i - 1] == step;
    ptrdiff_t ld = ptrdiff_t(step * int64_t(stride) * 2);
    if (!even) {
      bf16* copy = space.k.need(size_t(16) * COLUMNS * dp);
      ld = ptrdiff_t(heads) * dp * 2;
      for (int i = 0; i < 16; ++i)
        for (int h = 0; h < heads; ++h) {
          bf16* to = copy + (size_t(i) * heads + h) * dp;
          for (int d = 0; d < dp; d += 32)
            _mm512_storeu_si512(to + d, j + i < n ? _mm512_maskz_loadu_epi16(first_of_32(dim - d), first + at[j + i] * stride + h * dim + d)
                                                  : _mm512_setzero_si512());
        }
      left = copy;
    }
    _tile_zero(0);
    for (int s = 0; s < heads * steps; ++s) {
      ahead.ask(5);  // as many steps as a slot has lines, for 16 slots: a third of them
      _tile_loadd(4, left + s * 32, ld);
      _tile_loadd(6, q + s * 512, 64);
      _tile_dpbf16ps(0, 4, 6);
    }
    _tile_stored(0, scores + j * COLUMNS, COLUMNS * 4);
  }
#elif defined(PB_AVX512)
  const int columns = heads * g, lines = BITE * ahead.lines_of_slot() / (3 * columns) + 1;
  for (int j = 0; j < n; j += 16) {
    const bf16* rows[16];
    for (int i = 0; i < 16; ++i) rows[i] = first + at[std::min(j + i, n - 1)] * stride;
    __m512i turned[COLUMNS];
    for (int c = 0; c < columns; ++c) {
      const bf16* head = q + size_t(c) * dp;
      const ptrdiff_t offset = c / g * dim;
      ahead.ask(lines);
      __m512 sums[16];
      for (auto& one : sums) one = _mm512_setzero_ps();
      for (int d = 0; d < dp; d += 32) {
        const __mmask32 real = first_of_32(dim - d);
        const __m512bh query = (__m512bh)_mm512_loadu_si512(head + d);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i)
          sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)_mm512_maskz_loadu_epi16(real, rows[i] + offset + d), query);
      }
      turned[c] = _mm512_castps_si512(sums_of(sums));
    }
    for (int c = columns; c < COLUMNS; ++c) turned[c] = _mm512_setzero_si512();
    transpose16(turned);
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(scores + (j + i) * COLUMNS, turned[i]);
  }
#else
  for (int j = 0; j < n; ++j) {
    ahead.ask(ahead.lines_of_slot() / 3);
    for (int h = 0; h < heads; ++h) {
      const bf16* key = first + at[j] * stride + h * dim;
      for (int i = 0; i < g; ++i) {
        const bf16* head = q + size_t(h * g + i) * dp;
        float sum = 0;
        for (int d = 0; d < dim; ++d) sum += to_float(head[d]) * to_float(key[d]);
        scores[j * COLUMNS + h * g + i] = sum;
      }
    }
  }
#endif
}

// As `soften`, for `columns` queries at once.
inline void Attention::soften_one(float* scores, int n, int columns, float* best, float* total, float* sums,
                                  Ahead& ahead) const {
  float kept[COLUMNS];
#ifdef PB_AVX512
  __m512 top = _mm512_loadu_ps(best);
  const __m512 before = top;
  for (int j = 0; j < n; ++j) top = _mm512_max_ps(top, _mm512_loadu_ps(scores + j * COLUMNS));
  __m512 acc = _mm512_setzero_ps();
  for (int j = 0; j < n; ++j) {
    ahead.ask(1);
    const __m512 e = exp2_512(_mm512_sub_ps(_mm512_loadu_ps(scores + j * COLUMNS), top));
    _mm512_storeu_ps(scores + j * COLUMNS, e);
    acc = _mm512_add_ps(acc, e);
  }
  const __m512 factor = exp2_512(_mm512_sub_ps(before, top));
  _mm512_storeu_ps(kept, factor);
  _mm512_storeu_ps(total, _mm512_fmadd_ps(_mm512_loadu_ps(total), factor, acc));
  _mm512_storeu_ps(best, top);
#else
  for (int c = 0; c < columns; ++c) {
    float top = best[c], sum = 0;
    for (int j = 0; j < n; ++j) top = std::max(top, scores[j * COLUMNS + c]);
    for (int j = 0; j < n; ++j) sum += scores[j * COLUMNS + c] = std::exp2(scores[j * COLUMNS + c] - top);
    kept[c] = std::exp2(best[c] - top);
    total[c] = total[c] * kept[c] + sum;
    best[c] = top;
  }
#endif
  for (int c = 0; c < columns; ++c)
    if (kept[c] != 1.0f)
      for (int d = 0; d < dp; ++d) sums[size_t(c) * dp + d] *= kept[c];
}

inline void Attention::one(const Task& task, const Task* next) {
  const int t = m.plan.queries[task.first], position = m.plan.position[t];
  const int begin = std::max(task.begin, first_seen(position)), end = std::min(task.end, position + 1);
  const int32_t* at = slots(task.request);
  const int most = std::max(1, COLUMNS / g);  // KV heads whose queries fit into the columns
  float* scores = space.scores.need(BITE * COLUMNS);
  float* sums = space.single.need(size_t(COLUMNS) * dp);
  for (int kvh = task.head; kvh < task.head + task.heads; kvh += most) {
    const int heads = std::min(most, task.head + task.heads - kvh);
    bf16* q = space.q.need(size_t(COLUMNS) * COLUMNS * dp);
#ifdef PB_AMX
    // Right side: a step of 32 dimensions belongs to one KV head, and has zeros in the columns of the others.
    memset(q, 0, sizeof(bf16) * heads * dp * COLUMNS);
    bf16* row = space.probs.need(size_t(dp));
    for (int c = 0; c < heads * g; ++c) {
      give_query(t, kvh * g + c, row);
      bf16* right = q + size_t(c / g) * dp * COLUMNS;
      for (int d = 0; d < dp; d += 2) memcpy(right + (d / 2 * COLUMNS + c) * 2, row + d, 4);
    }
#else
    for (int c = 0; c < heads * g; ++c) give_query(t, kvh * g + c, q + size_t(c) * dp);
#endif
    alignas(64) float best[COLUMNS], total[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) best[c] = -INFINITY, total[c] = 0;
    memset(sums, 0, sizeof(float) * heads * g * dp);
    Ahead ahead(values + size_t(kvh) * dim, keys + size_t(kvh) * dim, stride, size_t(heads) * dim * sizeof(bf16));
    for (int j = begin; j < end; j += BITE) {
      const int n = std::min(BITE, end - j);
      if (j + BITE < end)
        ahead.begin(at + j + BITE, std::min(BITE, end - j - BITE));
      else if (next)
        ahead.begin(slots(next->request) + next->begin, std::min(BITE, next->end - next->begin));
      score_one(at + j, n, kvh, heads, q, scores, ahead);
      soften_one(scores, n, heads * g, best, total, sums, ahead);
      for (int h = 0; h < heads; ++h)
        weigh_values(values + size_t(kvh + h) * dim, stride, at + j, n, g, dim, dp, scores + h * g,
                     sums + size_t(h) * g * dp, ahead);
      ahead.ask(INT_MAX);
    }
    for (int c = 0; c < heads * g; ++c) in_order(sums + size_t(c) * dp, dp);
    for (int h = 0; h < heads; ++h) deliver(task, t, kvh + h, sums + size_t(h) * g * dp, best + h * g, total + h * g);
  }
}

inline void Attention::many(const Task& task) {
  const Plan& plan = m.plan;
  const int rows = task.count * g, padded = round_up(rows, 32), kvh = task.head;
  const int32_t *at = slots(task.request), *tokens = plan.queries.data() + task.first;
  bf16* q = space.q.need(size_t(padded) * dp);
  float* sums = space.sums.need(size_t(padded) * dp);
  float* scores = space.scores.need(32 * KEYS);
  bf16* weights = space.probs.need(32 * KEYS);
  bf16 *packed_k = space.k.need(size_t(KEYS) * dp), *packed_v = space.v.need(size_t(KEYS) * dp);
  float *best = space.best_score.need(padded), *total = space.total.need(padded);
  for (int i = 0; i < rows; ++i) give_query(tokens[i / g], kvh * g + i % g, q + size_t(i) * dp);
  memset(q + size_t(rows) * dp, 0, sizeof(bf16) * (padded - rows) * dp);
  memset(sums, 0, sizeof(float) * padded * dp);
  std::fill(best, best + padded, -INFINITY);
  std::fill(total, total + padded, 0.0f);
  int begin = task.end;
  for (int i = 0; i < task.count; ++i) begin = std::min(begin, std::max(task.begin, first_seen(plan.position[tokens[i]])));
  for (int j = begin; j < task.end; j += KEYS) {
    const int n = std::min(KEYS, task.end - j);
    pack_keys(keys + size_t(kvh) * dim, stride, at + j, n, dim, packed_k);
    pack_values(values + size_t(kvh) * dim, stride, at + j, n, dim, packed_v);
    for (int r = 0; r < rows; r += 32) {
      const int count = std::min(32, rows - r);
      // What these queries see together, and whether one of them sees less.
      int from = n, to = 0, last_from = 0, first_to = n;
      for (int i = r / g; i <= (r + count - 1) / g; ++i) {
        const int first = first_seen(plan.position[tokens[i]]) - j, last = plan.position[tokens[i]] + 1 - j;
        from = std::min(from, first), last_from = std::max(last_from, first);
        to = std::max(to, last), first_to = std::min(first_to, last);
      }
      from = std::max(0, from) / 32 * 32;
      to = round_up(std::min(to, n), 32);
      if (from >= to) continue;
      const bool hides = last_from > from || first_to < to;
      score_block(q + size_t(r) * dp, count, dp, packed_k, from, to, scores);
      if (hides)
        for (int i = 0; i < count; ++i) {
          const int position = plan.position[tokens[(r + i) / g]];
          float* row = scores + i * KEYS;
          for (int k = from; k < std::min(to, first_seen(position) - j); ++k) row[k] = -INFINITY;
          for (int k = std::max(from, std::min(n, position + 1 - j)); k < to; ++k) row[k] = -INFINITY;
        }
      soften(scores, count, from, to, dp, weights, best + r, total + r, sums + size_t(r) * dp);
      weigh_block(weights, count, dp, packed_v, from, to, sums + size_t(r) * dp);
    }
  }
  for (int i = 0; i < task.count; ++i)
    deliver(task, tokens[i], kvh, sums + size_t(i) * g * dp, best + i * g, total + i * g);
}

}  // namespace
