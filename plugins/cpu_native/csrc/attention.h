// Attention over paged KV. Scores are in powers of two: log2(e) is in the queries' scale.
#pragma once

#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstring>

#include "attend_many.h"
#include "attend_one.h"
#include "model.h"
#include "plan.h"
#include "rows.h"

namespace {

constexpr float LOG2E = 1.44269504f;

class Attention {
 public:
  Attention(Model& model, const PbBatch& batch, int layer, ThreadSpace& space)
      : model(model), batch(batch), space(space), dim(model.shape.head_dim), dp(round_up(model.shape.head_dim, 32)),
        group(model.group()), window(model.layers[layer].window),
        stride(size_t(model.shape.kv_heads) * model.shape.head_dim), keys(batch.keys[layer]),
        values(batch.values[layer]) {}

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
  Model& model;
  const PbBatch& batch;
  ThreadSpace& space;
  const int dim, dp, group, window;
  const size_t stride;
  const bf16 *const keys, *const values;

  const float* query(int t, int head) const {
    return model.qkv.data + size_t(t) * model.layers[0].qkv.n_pad + size_t(head) * dim;
  }
  const int32_t* slots(int request) const { return batch.table + batch.rows[request] * batch.table_stride; }
  int first_seen(int t) const { return window ? std::max(0, model.plan.place[t] - window + 1) : 0; }

  // Where the tail of a request begins in its row: none of its keys stands there or behind, where there is no tail.
  int tail_of(int request) const {
    return batch.tails && batch.tails[request] ? int(batch.seq_lens[request] - batch.tails[request]) : INT_MAX;
  }
  uint64_t seen_of_tail(int t) const;

  void give_query(int t, int head, bf16* to) const {
    scale_to_bf16(query(t, head), model.shape.scale * LOG2E, to, dim);
    for (int d = dim; d < dp; ++d) to[d] = 0;
  }

  void finish(int t, int head, const float* sums, float factor) const {
    scale_to_row(sums, factor, dim, Left(model.attended.data, model.q_size(), batch.tokens).row(t), head * dim);
  }

  // What a task has found out for the group of queries of token t with one KV head: all of it, or a part.
  void deliver(const Task& task, int t, int kvh, const float* sums, const float* best, const float* total) {
    const Plan& plan = model.plan;
    if (plan.parts[t] == 1) {
      for (int i = 0; i < group; ++i) finish(t, kvh * group + i, sums + size_t(i) * dp, 1.0f / total[i]);
      return;
    }
    const size_t size = part_size(model.shape);
    for (int i = 0; i < group; ++i) {
      float* part = part_of(t, task.part, kvh * group + i);
      part[0] = best[i];
      part[1] = total[i];
      memcpy(part + 16, sums + size_t(i) * dp, (size - 16) * sizeof(float));
    }
    if (model.plan.last_part(t, kvh, model.shape.kv_heads)) join(t, kvh);
  }

  float* part_of(int t, int part, int head) const {
    return model.parts.data + (size_t(model.plan.base[t] + part) * model.shape.heads + head) * part_size(model.shape);
  }

  void join(int t, int kvh) {
    const int parts = model.plan.parts[t];
    float* sums = space.joined.need(size_t(dp));
    for (int head = kvh * group; head < kvh * group + group; ++head) {
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

  struct Seen {
    int from, to;
    bool some_see_less;
  };
  Seen seen_by(const int32_t* token, const int32_t* end, int begin, int n) const;
  void hide(int token, int begin, int n, int from, int to, float* row) const;
  void hide_tail(int token, int tail, int begin, int from, int to, float* row) const;
  void hide_tail_of_one(int token, int tail, int begin, int n, float* scores) const;
  void one(const Task& task, const Task* next);
  void many(const Task& task);
  void soften_one(float* scores, int n, int columns, float* best, float* total, float* sums, Ahead& ahead) const;
};

// As `soften`, for `columns` queries at once.
inline void Attention::soften_one(float* scores, int n, int columns, float* best, float* total, float* sums,
                                  Ahead& ahead) const {
  float kept[COLUMNS];
  soften_columns(scores, n, columns, best, total, kept, ahead);
  for (int c = 0; c < columns; ++c)
    if (kept[c] != 1.0f)
      for (int d = 0; d < dp; ++d) sums[size_t(c) * dp + d] *= kept[c];
}

inline void Attention::one(const Task& task, const Task* next) {
  const int t = model.plan.queries[task.first], tail = tail_of(task.request);
  const int begin = std::max(task.begin, first_seen(t)), end = std::min(task.end, model.plan.last[t] + 1);
  const int32_t* at = slots(task.request);
  const int most = std::max(1, COLUMNS / group);  // KV heads whose queries fit into the columns
  float* scores = space.scores.need(BITE * COLUMNS);
  float* sums = space.single.need(size_t(COLUMNS) * dp);
  for (int kvh = task.head; kvh < task.head + task.heads; kvh += most) {
    const int heads = std::min(most, task.head + task.heads - kvh);
    bf16* q = space.queries.need(size_t(COLUMNS) * COLUMNS * dp);
    lay_out_queries(heads * group, heads, group, dp, q, space.weights,
                    [&](int c, bf16* to) { give_query(t, kvh * group + c, to); });
    alignas(64) float best[COLUMNS], total[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) best[c] = -INFINITY, total[c] = 0;
    memset(sums, 0, sizeof(float) * heads * group * dp);
    const HeadKeys head_keys{keys + size_t(kvh) * dim, stride, dim, dp, group};
    Ahead ahead(values + size_t(kvh) * dim, keys + size_t(kvh) * dim, stride, size_t(heads) * dim * sizeof(bf16));
    for (int j = begin; j < end; j += BITE) {
      const int n = std::min(BITE, end - j);
      if (j + BITE < end)
        ahead.begin(at + j + BITE, std::min(BITE, end - j - BITE));
      else if (next)
        ahead.begin(slots(next->request) + next->begin, std::min(BITE, next->end - next->begin));
      score_one(head_keys, at + j, n, heads, q, scores, space.keys, ahead);
      if (j + n > tail) hide_tail_of_one(t, tail, j, n, scores);
      soften_one(scores, n, heads * group, best, total, sums, ahead);
      for (int h = 0; h < heads; ++h)
        weigh_values(values + size_t(kvh + h) * dim, stride, at + j, n, group, dim, dp, scores + h * group,
                     sums + size_t(h) * group * dp, ahead);
      ahead.ask(INT_MAX);
    }
    for (int c = 0; c < heads * group; ++c) in_order(sums + size_t(c) * dp, dp);
    for (int h = 0; h < heads; ++h)
      deliver(task, t, kvh + h, sums + size_t(h) * group * dp, best + h * group, total + h * group);
  }
}

// Of the keys [begin, begin + n), what tokens up to `end` see together, and whether one of them sees less.
inline Attention::Seen Attention::seen_by(const int32_t* token, const int32_t* end, int begin, int n) const {
  const Plan& plan = model.plan;
  int from = n, to = 0, last_from = 0, first_to = n;
  for (; token < end; ++token) {
    const int first = first_seen(*token) - begin, last = plan.last[*token] + 1 - begin;
    from = std::min(from, first), last_from = std::max(last_from, first);
    to = std::max(to, last), first_to = std::min(first_to, last);
  }
  from = std::max(0, from) / 32 * 32;
  to = round_up(std::min(to, n), 32);
  return {from, to, last_from > from || first_to < to};
}

// Scores [from, to) of keys from `begin` on that a token does not see, of which there are n, become -inf.
inline void Attention::hide(int token, int begin, int n, int from, int to, float* row) const {
  for (int k = from; k < std::min(to, first_seen(token) - begin); ++k) row[k] = -INFINITY;
  for (int k = std::max(from, std::min(n, model.plan.last[token] + 1 - begin)); k < to; ++k) row[k] = -INFINITY;
}

// The bits of a token in a tail, without those that its window hides: what it sees there stands one after the other, so
// the window keeps the highest bits.
inline uint64_t Attention::seen_of_tail(int t) const {
  uint64_t bits = uint64_t(batch.bits[t]);
  if (window)
    for (int more = __builtin_popcountll(bits) - window; more > 0; --more) bits &= bits - 1;
  return bits;
}

// As `hide`, what a token does not see of the tail that begins at `tail`.
inline void Attention::hide_tail(int token, int tail, int begin, int from, int to, float* row) const {
  const uint64_t bits = seen_of_tail(token);
  for (int k = std::max(from, tail - begin); k < std::min(to, model.plan.last[token] + 1 - begin); ++k)
    if (!(bits >> (begin + k - tail) & 1)) row[k] = -INFINITY;
}

// The same in the scores of one query, of n keys from `begin` on. They get the lowest number and not -inf: there may be
// nothing else so far, and then weights of 1 that the token's own key will outweigh.
inline void Attention::hide_tail_of_one(int token, int tail, int begin, int n, float* scores) const {
  const uint64_t bits = seen_of_tail(token);
  for (int k = std::max(0, tail - begin); k < n; ++k)
    if (!(bits >> (begin + k - tail) & 1)) std::fill_n(scores + k * COLUMNS, COLUMNS, -FLT_MAX);
}

inline void Attention::many(const Task& task) {
  const Plan& plan = model.plan;
  const int rows = task.count * group, padded = round_up(rows, 32), kvh = task.head, tail = tail_of(task.request);
  const int32_t *at = slots(task.request), *tokens = plan.queries.data() + task.first;
  bf16* q = space.queries.need(size_t(padded) * dp);
  float* sums = space.sums.need(size_t(padded) * dp);
  float* scores = space.scores.need(32 * KEYS);
  bf16* weights = space.weights.need(32 * KEYS);
  bf16 *packed_k = space.keys.need(size_t(KEYS) * dp), *packed_v = space.values.need(size_t(KEYS) * dp);
  float *best = space.best_score.need(padded), *total = space.total.need(padded);
  for (int i = 0; i < rows; ++i) give_query(tokens[i / group], kvh * group + i % group, q + size_t(i) * dp);
  memset(q + size_t(rows) * dp, 0, sizeof(bf16) * (padded - rows) * dp);
  memset(sums, 0, sizeof(float) * padded * dp);
  std::fill(best, best + padded, -INFINITY);
  std::fill(total, total + padded, 0.0f);
  int begin = task.end;
  for (int i = 0; i < task.count; ++i) begin = std::min(begin, std::max(task.begin, first_seen(tokens[i])));
  for (int j = begin; j < task.end; j += KEYS) {
    const int n = std::min(KEYS, task.end - j);
    pack_keys(keys + size_t(kvh) * dim, stride, at + j, n, dim, packed_k);
    pack_values(values + size_t(kvh) * dim, stride, at + j, n, dim, packed_v);
    for (int r = 0; r < rows; r += 32) {
      const int count = std::min(32, rows - r);
      const Seen seen = seen_by(tokens + r / group, tokens + (r + count - 1) / group + 1, j, n);
      const int from = seen.from, to = seen.to;
      if (from >= to) continue;
      score_block(q + size_t(r) * dp, count, dp, packed_k, from, to, scores);
      if (seen.some_see_less)
        for (int i = 0; i < count; ++i) hide(tokens[(r + i) / group], j, n, from, to, scores + i * KEYS);
      if (j + n > tail)
        for (int i = 0; i < count; ++i) hide_tail(tokens[(r + i) / group], tail, j, from, to, scores + i * KEYS);
      soften(scores, count, from, to, dp, weights, best + r, total + r, sums + size_t(r) * dp);
      weigh_block(weights, count, dp, packed_v, from, to, sums + size_t(r) * dp);
    }
  }
  for (int i = 0; i < task.count; ++i)
    deliver(task, tokens[i], kvh, sums + size_t(i) * group * dp, best + i * group, total + i * group);
}

}  // namespace
