// Attention over paged KV. Scores are in powers of two: log2(e) is in the queries' scale.
#pragma once

#include <climits>

#include "attend_many.h"
#include "attend_one.h"
#include "model.h"
#include "plan.h"

namespace {

constexpr float LOG2E = 1.44269504f;

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
      _mm256_storeu_si256((__m256i*)(to + d),
                          (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_loadu_ps(from + d), by)));
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
      _mm256_storeu_si256((__m256i*)to.at(head * dim + d),
                          (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_loadu_ps(sums + d), by)));
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
    // Slots that follow each other in equal steps (a prompt's, or those of a batch that decodes) are a tile as they
    // are.
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
            _mm512_storeu_si512(to + d, j + i < n ? _mm512_maskz_loadu_epi16(first_of_32(dim - d),
                                                                             first + at[j + i] * stride + h * dim + d)
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
  for (int i = 0; i < task.count; ++i)
    begin = std::min(begin, std::max(task.begin, first_seen(plan.position[tokens[i]])));
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
