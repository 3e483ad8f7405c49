// One forward pass, as one of the threads runs it: stages that all of them begin and end together.
#pragma once

#include <algorithm>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "adapters.h"
#include "attention.h"
#include "fused.h"
#include "model.h"
#include "product.h"
#include "routing.h"
#include "rows.h"
#include "team.h"

namespace {

class Forward {
 public:
  Forward(Model& model, const PbBatch& batch, int id)
      : model(model), batch(batch), shape(model.shape), space(model.space[id]), id(id), tokens(batch.tokens),
        hidden(model.shape.hidden), threads(model.team.size()), attended(model.attended.data, model.q_size(), tokens),
        act(model.act.data, model.shape.inter, tokens), turn_first(some_share_queries()), sum(model.ranks.next) {}

  void run() {
    embed();
    for (int l = 0; l < shape.layers; ++l) {
      const Layer& layer = model.layers[l];
      current = l;
      tap(l);
      project_qkv(layer);
      if (turn_first) turn_heads(layer, l);
      attend(layer, l);
      project_out(layer);
      const Matrix& next = l + 1 < shape.layers ? model.layers[l + 1].qkv : model.head;
      if (layer.experts.empty()) {
        project_gate_up(layer);
        project_down(layer, next);
      } else {
        mix_experts(layer);
      }
      if (l < batch.deep_levels) deepen(l);
    }
    tap(shape.layers);
    tap(shape.layers + 1);
    if (batch.hidden) give_hidden();
    if (batch.logits || batch.drawn) {
      norm_sampled();
      project_head();
      if (batch.drawn) draw();
    }
    if (id == 0) model.ranks.next = sum;
    release_tiles();
  }

 private:
  Model& model;
  const PbBatch& batch;
  const PbShape& shape;
  ThreadSpace& space;
  const int id, tokens, hidden, threads;
  const Left attended, act;
  const bool turn_first;
  uint32_t sum;       // of all ranks, the next one
  int current = 0;    // layer
  int counter = 0;    // runs of work that were shared so far
  int tapped = 0;     // places that have come by
  int gathered = -1;  // the expert, of those that have tokens, whose rows this thread has gathered last

  // A query that one task answers alone is turned there; where tasks share one, all are turned before.
  bool some_share_queries() const {
    bool some = model.plan.split;
    for (int r = 0; r < batch.batch; ++r) some |= batch.starts[r + 1] - batch.starts[r] != 1;
    return some;
  }

  float* residual(int64_t token) const { return model.residual.data + size_t(token) * hidden; }

  static const float* bias_of_block(const std::vector<float>& bias, int nb) {
    return bias.empty() ? nullptr : bias.data() + nb * NB;
  }

  // ---- sharing work ----

  // Work that any free thread takes from one queue.
  Shared share(int total, int piece) { return Shared::queue(model.taken(counter++), total, piece, id); }

  // Tokens, to each thread those that products give it where they give tokens to threads.
  Shared share_tokens() {
    if (tokens <= MB) return share(tokens, few());
    const int part = Division::rows_of_one(tokens, threads);
    return Shared::parts(model.taken(counter++), tokens, part, part * 3 / 4, few(), threads, id);
  }
  int few() const { return std::max(1, tokens / (threads * 8)); }

  // f(token) for all tokens.
  template <class F>
  void each_token(F&& f) {
    Shared work = share_tokens();
    int from, to;
    while (work.take(from, to))
      for (int t = from; t < to; ++t) f(t);
  }

  // a * w^T, and the beginning of what is read after it. Most blocks of a thread are consecutive, for memory is read
  // best in long runs; the last ones go to free threads, which evens out what others on the machine take from a
  // thread.
  template <class F>
  void multiply(const Left& a, int rows, const Matrix& w, const Matrix* next, F&& done) {
    const Division division(w, rows, threads);
    const int part = division.part;
    product(Shared::parts(model.taken(counter++), division.items(), part, part * 7 / 8, part / 24, threads, id),
            division, a, rows, w, space.product, done);
    if (next && rows <= MB) warm(*next, id * Division(*next, rows, threads).part);
  }

  // The same for all tokens at a site of the current layer, and what adapters add to it.
  template <class F>
  void multiply_at(Site site, const Left& a, const Matrix& w, const Matrix* next, F&& done) {
    const AddedBySite added(batch.additions, current * LAYER_SITES + site, a, model.small.data);
    if (!added.pieces) return multiply(a, tokens, w, next, done);
    std::atomic<int>& computed = *model.taken(counter++);
    int from, to, spins = 0;
    for (Shared work = share(added.pieces, 1); work.take(from, to); computed.fetch_add(1, std::memory_order_release))
      added.shrink(from, space.gathered);
    multiply(a, tokens, w, next, [&](int r, int rows, int nb, float* sums) {
      while (computed.load(std::memory_order_acquire) < added.pieces) relax(spins);
      added.expand(r, rows, nb, sums);
      done(r, rows, nb, sums);
    });
  }

  // All threads have done their part of `stage`; what follows may read it.
  void meet(Stage stage) {
    model.team.barrier();
    if (id == 0) {
      const auto now = std::chrono::steady_clock::now();
      model.seconds[stage] += std::chrono::duration<double>(now - model.mark).count();
      model.mark = now;
    }
  }

  // ---- stages ----

  void embed();
  void tap(int place);
  void project_qkv(const Layer& layer);
  void turn_heads(const Layer& layer, int l);
  void attend(const Layer& layer, int l);
  void project_out(const Layer& layer);
  void project_gate_up(const Layer& layer);
  void project_down(const Layer& layer, const Matrix& next);
  void mix_experts(const Layer& layer);
  void deepen(int l);
  void give_hidden();
  void norm_sampled();
  void project_head();
  void draw();

  const float* embedded(int64_t token) const;
  void embed_one(int64_t token, float* x) const;
  template <class F>
  void add_ranks(F&& write);
  Left normed(const std::vector<float>& weight);
  void enter_head(const Layer& layer, int l, int token, int kvh);
  void add_to_residual(Site site, const Left& a, const Matrix& w, const std::vector<float>& bias, const Matrix* next);
  Routed route(const Layer& layer);
  void expert_up(const Layer& layer, const Routed& routed, int one, int from, int to);
  void expert_down(const Layer& layer, const Routed& routed, int one, int from, int to);
  void gate(const float* sums, const float* bias, int columns, bf16* out) const;
};

// The states at a place, where they are wanted. No one waits for them: threads meet before something else is written to
// the residual.
inline void Forward::tap(int place) {
  if (tapped == batch.tap_count || batch.tap_places[tapped] != place) return;
  bf16* states = batch.tapped + size_t(tapped++) * tokens * hidden;
  each_token([&](int t) {
    bf16* out = states + size_t(t) * hidden;
    if (place > shape.layers)
      rms_norm(residual(t), model.final_norm.data(), hidden, shape.eps, Plain<bf16>{out});
    else
      floats_to_bf16(residual(t), out, hidden);
  });
}

// All tokens normalised. A few of them every thread does for itself: that is sooner done than meeting once more.
inline Left Forward::normed(const std::vector<float>& weight) {
  const bool alone = tokens <= MB;
  bf16* memory = alone ? space.normed.need(Left::size(hidden, tokens)) : model.normed.data;
  const Left out(memory, hidden, tokens);
  const auto norm = [&](int t) { rms_norm(residual(t), weight.data(), hidden, shape.eps, out.row(t)); };
  if (alone) {
    for (int t = 0; t < tokens; ++t) norm(t);
  } else {
    each_token(norm);
    meet(NORM);
  }
  return out;
}

inline void Forward::project_qkv(const Layer& layer) {
  const int ld = layer.qkv.n_pad;
  multiply_at(SITE_QKV, normed(layer.norm1), layer.qkv, nullptr, [&](int r, int rows, int nb, const float* sums) {
    const float* bias = bias_of_block(layer.qkv_bias, nb);
    for (int i = 0; i < rows; ++i) {
      float* out = model.qkv.data + size_t(r + i) * ld + nb * NB;
      for (int j = 0; j < NB; ++j) out[j] = sums[i * NB + j] + (bias ? bias[j] : 0.0f);
    }
  });
  meet(QKV);
}

// Query and key of one token and KV head are turned, key and value stored.
inline void Forward::enter_head(const Layer& layer, int l, int token, int kvh) {
  const int dim = shape.head_dim, half = dim / 2, group = model.group();
  float* row = model.qkv.data + size_t(token) * layer.qkv.n_pad;
  const float *cos = batch.cos + size_t(token) * half, *sin = batch.sin + size_t(token) * half;
  for (int i = 0; i < group; ++i)
    turn(row + (kvh * group + i) * dim, shape.qk_norm ? layer.q_norm.data() : nullptr, cos, sin, dim, shape.eps);
  float *key = row + model.q_size() + kvh * dim, *value = key + model.kv_size();
  turn(key, shape.qk_norm ? layer.k_norm.data() : nullptr, cos, sin, dim, shape.eps);
  const size_t at = (size_t(batch.out_loc[token]) * shape.kv_heads + kvh) * dim;
  floats_to_bf16(key, batch.keys[l] + at, dim);
  floats_to_bf16(value, batch.values[l] + at, dim);
}

inline void Forward::turn_heads(const Layer& layer, int l) {
  each_token([&](int t) {
    for (int kvh = 0; kvh < shape.kv_heads; ++kvh) enter_head(layer, l, t, kvh);
  });
  meet(ROPE);
}

inline void Forward::attend(const Layer& layer, int l) {
  Attention attention(model, batch, l, space);
  Shared work = share(int(model.plan.tasks.size()), 1);
  int from, to;
  while (work.take(from, to)) {
    const Task& task = model.plan.tasks[from];
    if (!turn_first)
      for (int kvh = task.head; kvh < task.head + task.heads; ++kvh)
        enter_head(layer, l, model.plan.queries[task.first], kvh);
    attention.run(task, model.plan.after(from, threads));
  }
  meet(ATTENTION);
}

inline void Forward::project_out(const Layer& layer) {
  add_to_residual(SITE_O, attended, layer.o, layer.o_bias, layer.experts.empty() ? &layer.gate_up : nullptr);
  meet(OUT);
}

// Sums are 16 columns of the gate, then the same 16 of the other.
inline void Forward::gate(const float* sums, const float* bias, int columns, bf16* out) const {
  if (shape.act == SILU && columns == 16 && !bias) return gate_silu(sums, out);
  for (int j = 0; j < columns; ++j) {
    const float gate = sums[j] + (bias ? bias[j] : 0.0f), up = sums[16 + j] + (bias ? bias[16 + j] : 0.0f);
    out[j] = to_bf16(activate(gate, shape.act) * up);
  }
}

inline void Forward::project_gate_up(const Layer& layer) {
  multiply_at(SITE_GATE_UP, normed(layer.norm2), layer.gate_up, &layer.down,
              [&](int r, int rows, int nb, const float* sums) {
                const float* bias = bias_of_block(layer.gate_up_bias, nb);
                const int columns = std::min(16, shape.inter - nb * 16);
                for (int i = 0; i < rows; ++i) gate(sums + i * NB, bias, columns, act.row(r + i).at(nb * 16));
              });
  meet(GATE_UP);
}

inline void Forward::project_down(const Layer& layer, const Matrix& next) {
  add_to_residual(SITE_DOWN, act, layer.down, layer.down_bias, &next);
  meet(DOWN);
}

// No one waits for hidden states: threads meet before something else is written to the residual.
inline void Forward::give_hidden() {
  Shared work = share(batch.hidden_count, 4);
  int from, to;
  while (work.take(from, to))
    for (int i = from; i < to; ++i) {
      float* out = batch.hidden + size_t(i) * hidden;
      rms_norm(residual(batch.hidden_rows[i]), model.final_norm.data(), hidden, shape.eps, Plain<float>{out});
    }
}

// Sampled rows move to the front of `normed`, which is not read any more.
inline void Forward::norm_sampled() {
  const Left out(model.normed.data, hidden, batch.sampled);
  Shared work = share(batch.sampled, 4);
  int from, to;
  while (work.take(from, to))
    for (int i = from; i < to; ++i) {
      const int64_t token = batch.logits_indices ? batch.logits_indices[i] : i;
      rms_norm(residual(token), model.final_norm.data(), hidden, shape.eps, out.row(i));
    }
  Best* best = space.best.need(size_t(batch.sampled));
  for (int i = 0; i < batch.sampled; ++i) best[i] = {-INFINITY, INT32_MAX};
  meet(NORM);
}

inline void Forward::project_head() {
  const Left from(model.normed.data, hidden, batch.sampled);
  multiply(from, batch.sampled, model.head, nullptr, [&](int r, int rows, int nb, const float* sums) {
    const int columns = std::min(NB, shape.vocab - nb * NB);
    for (int i = 0; i < rows; ++i) {
      const float* row = sums + i * NB;
      if (float* to = model.logits_to[r + i])
        memcpy(to + nb * NB, row, sizeof(float) * columns);
      else
        note_largest(row, columns, nb * NB, space.best.data[r + i]);
    }
  });
  meet(HEAD);
}

inline void Forward::draw() {
  logits_indices(model, batch, share(batch.sampled, 1), space.sample);
  meet(SAMPLE);
}

}  // namespace
