// One forward pass of a dense decoder (Llama, Mistral, Qwen2, Qwen3) on a CPU, over paged KV, in one call.
//
// All threads run the same program and meet at barriers; between two of them they take pieces of the work from a
// counter, so that a thread whose core is wanted elsewhere does less. Weights and KV are bf16, sums and the residual
// are float32.
//
// Compiled once per instruction set: PB_AMX (tiles; implies AVX-512 and its bf16 dot product), PB_AVX512 (the latter
// alone), or neither (whatever the compiler vectorises of plain loops). With PB_EMULATED_TILES the former needs no AMX.

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention.h"
#include "fused.h"
#include "model.h"
#include "numbers.h"
#include "product.h"
#include "rows.h"
#include "sampler.h"
#include "team.h"

namespace {

struct Forward {
  Model& m;
  const PbBatch& b;

  // Work that whoever is free takes from one queue.
  Shared share(int id, int& counter, int total, int piece) {
    return Shared::queue(m.taken(counter++), total, piece, id);
  }

  // Tokens, to each thread those that products give it where they give tokens to threads.
  Shared share_tokens(int id, int& counter) {
    if (b.tokens <= MB) return share(id, counter, b.tokens, few());
    const int part = Division::rows_of_one(b.tokens, m.team.size());
    return Shared::parts(m.taken(counter++), b.tokens, part, part * 3 / 4, few(), m.team.size(), id);
  }
  int few() const { return std::max(1, b.tokens / (m.team.size() * 8)); }

  // a * w^T, and the beginning of what is read after it. Most blocks of a thread are consecutive, for memory is read
  // best in long runs; the last ones go to whoever is free, which evens out what others on the machine take from a
  // thread.
  template <class F>
  void multiply(int id, int& counter, const Left& a, int rows, const Matrix& w, const Matrix* next, F&& done) {
    const Division division(w, rows, m.team.size());
    const int part = division.part;
    product(Shared::parts(m.taken(counter++), division.items(), part, part * 7 / 8, part / 24, m.team.size(), id),
            division, a, rows, w, m.space[id].product, done);
    if (next && rows <= MB) warm(*next, id * Division(*next, rows, m.team.size()).part);
  }

  void norm(int from, int to, const std::vector<float>& weight, const Left& h) {
    for (int t = from; t < to; ++t)
      rms_norm(m.x.p + size_t(t) * m.s.hidden, weight.data(), m.s.hidden, m.s.eps, h.row(t));
  }

  // All tokens normalised. A few of them every thread does for itself: that is sooner done than meeting once more.
  Left normed(int id, int& counter, const std::vector<float>& weight) {
    if (b.tokens <= MB) {
      const Left h(m.space[id].h.need(Left::size(m.s.hidden, b.tokens)), m.s.hidden, b.tokens);
      norm(0, b.tokens, weight, h);
      return h;
    }
    const Left h(m.h.p, m.s.hidden, b.tokens);
    Shared work = share_tokens(id, counter);
    int from, to;
    while (work.take(from, to)) norm(from, to, weight, h);
    meet(id, NORM);
    return h;
  }

  // Query and key of one token and KV head are turned, key and value stored.
  void enter_head(const Layer& layer, int l, int t, int kvh) {
    const PbShape& s = m.s;
    const int dim = s.head_dim, half = dim / 2, g = m.group();
    float* row = m.qkv.p + size_t(t) * m.layers[0].qkv.n_pad;
    const float *cos = b.cos + size_t(t) * half, *sin = b.sin + size_t(t) * half;
    for (int i = 0; i < g; ++i)
      turn(row + (kvh * g + i) * dim, s.qk_norm ? layer.q_norm.data() : nullptr, cos, sin, dim, s.eps);
    float *k = row + m.q_size() + kvh * dim, *v = row + m.q_size() + m.kv_size() + kvh * dim;
    turn(k, s.qk_norm ? layer.k_norm.data() : nullptr, cos, sin, dim, s.eps);
    const size_t at = (size_t(b.out_loc[t]) * s.kv_heads + kvh) * dim;
    floats_to_bf16(k, b.keys[l] + at, dim);
    floats_to_bf16(v, b.values[l] + at, dim);
  }

  // All threads have done their part of `stage`; what follows may read it.
  void meet(int id, Stage stage) {
    m.team.barrier();
    if (id == 0) {
      const auto now = std::chrono::steady_clock::now();
      m.seconds[stage] += std::chrono::duration<double>(now - m.mark).count();
      m.mark = now;
    }
  }

  void run(int id);
};

void Forward::run(int id) {
  const PbShape& s = m.s;
  ThreadSpace& space = m.space[id];
  const int tokens = b.tokens, hidden = s.hidden, threads = m.team.size();
  const int ldq = m.layers[0].qkv.n_pad;
  const Left attended(m.attended.p, m.q_size(), tokens), act(m.act.p, s.inter, tokens);
  // A query that one task answers alone is turned there; where tasks share one, all are turned before.
  bool turn_first = m.plan.split;
  for (int r = 0; r < b.batch; ++r) turn_first |= b.starts[r + 1] - b.starts[r] != 1;
  int counter = 0, from, to;
  {
    Shared work = share_tokens(id, counter);
    while (work.take(from, to))
      for (int t = from; t < to; ++t) {
        // What no number is written to, where sizes are odd.
        attended.row(t).zero_from(m.q_size());
        act.row(t).zero_from(s.inter);
        float* x = m.x.p + size_t(t) * hidden;
        if (b.embeds) {
          memcpy(x, b.embeds + size_t(t) * hidden, sizeof(float) * hidden);
        } else {
          const bf16* e = m.embedding + size_t(b.ids[t]) * hidden;
          for (int i = 0; i < hidden; ++i) x[i] = to_float(e[i]);
        }
      }
  }
  meet(id, EMBED);
  for (int l = 0; l < s.layers; ++l) {
    const Layer& layer = m.layers[l];
    multiply(id, counter, normed(id, counter, layer.norm1), tokens, layer.qkv, nullptr,
             [&](int r, int rows, int nb, const float* sums) {
               const float* bias = layer.qkv_bias.empty() ? nullptr : layer.qkv_bias.data() + nb * NB;
               for (int i = 0; i < rows; ++i) {
                 float* out = m.qkv.p + size_t(r + i) * ldq + nb * NB;
                 for (int j = 0; j < NB; ++j) out[j] = sums[i * NB + j] + (bias ? bias[j] : 0.0f);
               }
             });
    meet(id, QKV);
    if (turn_first) {
      Shared work = share_tokens(id, counter);
      while (work.take(from, to))
        for (int t = from; t < to; ++t)
          for (int kvh = 0; kvh < s.kv_heads; ++kvh) enter_head(layer, l, t, kvh);
      meet(id, ROPE);
    }
    {
      Attention attention(m, b, l, space);
      Shared work = share(id, counter, int(m.plan.tasks.size()), 1);
      while (work.take(from, to)) {
        const Task& task = m.plan.tasks[from];
        if (!turn_first)
          for (int kvh = task.head; kvh < task.head + task.heads; ++kvh)
            enter_head(layer, l, m.plan.queries[task.first], kvh);
        attention.run(task, m.plan.after(from, threads));
      }
    }
    meet(id, ATTENTION);
    const auto add = [&](const std::vector<float>& bias_of) {
      return [&](int r, int rows, int nb, const float* sums) {
        const int columns = std::min(NB, hidden - nb * NB);
        const float* bias = bias_of.empty() ? nullptr : bias_of.data() + nb * NB;
        for (int i = 0; i < rows; ++i) {
          float* out = m.x.p + size_t(r + i) * hidden + nb * NB;
          for (int j = 0; j < columns; ++j) out[j] += sums[i * NB + j] + (bias ? bias[j] : 0.0f);
        }
      };
    };
    multiply(id, counter, attended, tokens, layer.o, &layer.gate_up, add(layer.o_bias));
    meet(id, OUT);
    multiply(id, counter, normed(id, counter, layer.norm2), tokens, layer.gate_up, &layer.down,
             [&](int r, int rows, int nb, const float* sums) {
               // 16 columns of the gate, then the same 16 of the other.
               const float* bias = layer.gate_up_bias.empty() ? nullptr : layer.gate_up_bias.data() + nb * NB;
               const int columns = std::min(16, s.inter - nb * 16);
               for (int i = 0; i < rows; ++i) {
                 bf16* out = act.row(r + i).at(nb * 16);
                 const float* row = sums + i * NB;
                 if (s.act == SILU && columns == 16 && !bias) {
                   gate_silu(row, out);
                   continue;
                 }
                 for (int j = 0; j < columns; ++j) {
                   const float gate = row[j] + (bias ? bias[j] : 0.0f), up = row[16 + j] + (bias ? bias[16 + j] : 0.0f);
                   out[j] = to_bf16(activate(gate, s.act) * up);
                 }
               }
             });
    meet(id, GATE_UP);
    multiply(id, counter, act, tokens, layer.down, l + 1 < s.layers ? &m.layers[l + 1].qkv : &m.head,
             add(layer.down_bias));
    meet(id, DOWN);
  }
  if (b.hidden) {
    Shared work = share(id, counter, b.hidden_count, 4);
    while (work.take(from, to))
      for (int i = from; i < to; ++i) {
        const float* x = m.x.p + size_t(b.hidden_rows[i]) * hidden;
        float sum = 0;
        for (int j = 0; j < hidden; ++j) sum += x[j] * x[j];
        const float scale = 1.0f / std::sqrt(sum / hidden + s.eps);
        for (int j = 0; j < hidden; ++j) b.hidden[size_t(i) * hidden + j] = x[j] * scale * m.final_norm[j];
      }
  }
  if (b.logits || b.drawn) {
    const Left h(m.h.p, hidden, b.sampled);
    {
      // Sampled rows move to the front of `h`, which nobody reads any more.
      Shared work = share(id, counter, b.sampled, 4);
      while (work.take(from, to))
        for (int i = from; i < to; ++i)
          rms_norm(m.x.p + size_t(b.sample_rows ? b.sample_rows[i] : i) * hidden, m.final_norm.data(), hidden, s.eps,
                   h.row(i));
    }
    Best* best = space.best.need(size_t(b.sampled));
    for (int i = 0; i < b.sampled; ++i) best[i] = {-INFINITY, INT32_MAX};
    meet(id, NORM);
    multiply(id, counter, h, b.sampled, m.head, nullptr, [&](int r, int rows, int nb, const float* sums) {
      const int columns = std::min(NB, s.vocab - nb * NB);
      for (int i = 0; i < rows; ++i) {
        const float* row = sums + i * NB;
        if (float* to = m.logits_to[r + i])
          memcpy(to + nb * NB, row, sizeof(float) * columns);
        else
          note_largest(row, columns, nb * NB, best[r + i]);
      }
    });
    meet(id, HEAD);
    if (b.drawn) {
      sample_rows(m, b, share(id, counter, b.sampled, 1), space.sample);
      meet(id, SAMPLE);
    }
  }
  release_tiles();
}

void plan_attention(Model& m, const PbBatch& b) {
  m.plan.make({b.rows, b.seq_lens, b.starts, b.table, b.table_stride, b.batch, b.tokens, m.s.kv_heads, m.group(),
               m.team.size()});
  m.parts.need(size_t(m.plan.total_parts) * m.s.heads * Attention::part_size(m.s));
}

// Logits float [n, vocab] of hidden states float [n, hidden] as `hidden` of a batch has them.
void project(Model& m, const float* hidden, int n, float* logits, int id) {
  const Left h(m.h.p, m.s.hidden, n);
  const Division division(m.head, n, m.team.size());
  Shared rows = Shared::queue(m.taken(0), n, 4, id);
  int from, to;
  while (rows.take(from, to))
    for (int i = from; i < to; ++i) {
      const Left::Row row = h.row(i);
      for (int c = 0; c < m.s.hidden; c += KB)
        floats_to_bf16(hidden + size_t(i) * m.s.hidden + c, row.at(c), std::min(KB, m.s.hidden - c));
      row.zero_from(m.s.hidden);
    }
  m.team.barrier();
  product(Shared::parts(m.taken(1), division.items(), division.part, 0, 8, m.team.size(), id), division, h, n, m.head,
          m.space[id].product, [&](int r, int count, int nb, const float* sums) {
            const int columns = std::min(NB, m.s.vocab - nb * NB);
            for (int i = 0; i < count; ++i)
              memcpy(logits + size_t(r + i) * m.s.vocab + nb * NB, sums + i * NB, sizeof(float) * columns);
          });
  release_tiles();
}

void keep(std::vector<float>& to, const float* from, int n, int n_pad) {
  if (!from) return;
  to.assign(n_pad, 0.0f);
  std::copy(from, from + n, to.begin());
}

}  // namespace

extern "C" {

// 0, or an errno: the kernel must allow a process to use tiles.
int pb_prepare() { return allow_tiles(); }

// One product, for tests and measurements: out float [m, n] = a bf16 [m, k] * (w bf16 [n, k], kept as `wanted`)^T. The
// Format that it came to be in, or -1 where memory does not suffice.
int pb_multiply(int threads, int wanted, const bf16* w, int n, int k, const bf16* a, int m, float* out) {
  try {
    Team team(threads);
    Arena arena;
    Matrix matrix;
    matrix.pack(team, arena, n, k, Wanted(wanted), [&](int i) { return w + size_t(i) * k; });
    std::vector<bf16> numbers(Left::size(k, m));
    const Left left(numbers.data(), k, m);
    for (int i = 0; i < m; ++i)
      for (int c = 0; c < k; c += KB)
        memcpy(left.row(i).at(c), a + size_t(i) * k + c, sizeof(bf16) * std::min(KB, k - c));
    std::vector<ProductSpace> space(threads);
    const Division division(matrix, m, threads);
    std::vector<std::atomic<int>> taken(threads);
    team.run([&](int id) {
      product(Shared::parts(taken.data(), division.items(), division.part, division.part / 2, 2, threads, id), division,
              left, m, matrix, space[id], [&](int r, int rows, int nb, const float* sums) {
                const int columns = std::min(NB, n - nb * NB);
                for (int i = 0; i < rows; ++i)
                  memcpy(out + size_t(r + i) * n + nb * NB, sums + i * NB, sizeof(float) * columns);
              });
      release_tiles();
    });
    return matrix.format;
  } catch (...) {
    return -1;
  }
}

void* pb_create(const PbShape* shape) {
  try {
    return new Model(*shape);
  } catch (...) {
    return nullptr;
  }
}

void pb_destroy(void* handle) { delete static_cast<Model*>(handle); }

// Copies, packed. 0, or 1 where memory does not suffice.
int pb_set_layer(void* handle, int index, const PbLayerWeights* w) {
  try {
    Model& m = *static_cast<Model*>(handle);
    const PbShape& s = m.s;
    Layer& layer = m.layers[index];
    const int hidden = s.hidden, q = m.q_size(), kv = m.kv_size();
    const Wanted wanted = Wanted(s.wanted);
    const auto pack = [&](Matrix& to, int n, int k, auto&& row) { to.pack(m.team, m.arena, n, k, wanted, row); };
    pack(layer.qkv, q + 2 * kv, hidden, [&](int i) {
      return i < q        ? w->q + size_t(i) * hidden
             : i < q + kv ? w->k + size_t(i - q) * hidden
                          : w->v + size_t(i - q - kv) * hidden;
    });
    pack(layer.o, hidden, q, [&](int i) { return w->o + size_t(i) * q; });
    const int inter = s.inter;
    // 16 rows of the gate, then the same 16 of the other.
    pack(layer.gate_up, round_up(inter, 16) * 2, hidden, [&](int i) {
      const int at = i / 32 * 16 + i % 16;
      return at < inter ? (i % 32 < 16 ? w->gate : w->up) + size_t(at) * hidden : nullptr;
    });
    pack(layer.down, hidden, inter, [&](int i) { return w->down + size_t(i) * inter; });
    keep(layer.norm1, w->norm1, hidden, hidden);
    keep(layer.norm2, w->norm2, hidden, hidden);
    keep(layer.q_norm, w->q_norm, s.head_dim, s.head_dim);
    keep(layer.k_norm, w->k_norm, s.head_dim, s.head_dim);
    keep(layer.o_bias, w->o_bias, hidden, layer.o.n_pad);
    keep(layer.down_bias, w->down_bias, hidden, layer.down.n_pad);
    if (w->q_bias) {
      layer.qkv_bias.assign(layer.qkv.n_pad, 0.0f);
      std::copy(w->q_bias, w->q_bias + q, layer.qkv_bias.begin());
      std::copy(w->k_bias, w->k_bias + kv, layer.qkv_bias.begin() + q);
      std::copy(w->v_bias, w->v_bias + kv, layer.qkv_bias.begin() + q + kv);
    }
    if (w->gate_bias) {
      layer.gate_up_bias.assign(layer.gate_up.n_pad, 0.0f);
      for (int i = 0; i < inter; ++i) {
        layer.gate_up_bias[i / 16 * 32 + i % 16] = w->gate_bias[i];
        layer.gate_up_bias[i / 16 * 32 + 16 + i % 16] = w->up_bias[i];
      }
    }
    layer.window = w->window;
    return 0;
  } catch (...) {
    return 1;
  }
}

// `embedding` [vocab, hidden] is not copied and must live as long as the model; `head` is packed.
int pb_set_ends(void* handle, const bf16* embedding, const bf16* head, const float* final_norm) {
  try {
    Model& m = *static_cast<Model*>(handle);
    m.embedding = embedding;
    m.head.pack(m.team, m.arena, m.s.vocab, m.s.hidden, Wanted(m.s.wanted),
                [&](int i) { return head + size_t(i) * m.s.hidden; });
    keep(m.final_norm, final_norm, m.s.hidden, m.s.hidden);
    return 0;
  } catch (...) {
    return 1;
  }
}

// Of the matrices in each Format: how many numbers, and in how many bytes, into int64 [FORMATS][2].
void pb_count_weights(void* handle, int64_t* counts) {
  const Model& m = *static_cast<Model*>(handle);
  std::fill(counts, counts + FORMATS * 2, 0);
  const auto count = [&](const Matrix& w) {
    counts[w.format * 2] += int64_t(w.n) * w.k;
    counts[w.format * 2 + 1] += int64_t(w.block_bytes() * w.blocks() + w.rest.size() * sizeof(Matrix::Rest));
  };
  for (const Layer& layer : m.layers) {
    count(layer.qkv);
    count(layer.o);
    count(layer.gate_up);
    count(layer.down);
  }
  count(m.head);
}

// One forward pass. 0, or 1 where memory does not suffice.
int pb_forward(void* handle, const PbBatch* batch) {
  Model& m = *static_cast<Model*>(handle);
  try {
    const size_t rows = size_t(round_up(batch->tokens, MB)),
                 sampled = size_t(round_up(std::max(1, batch->sampled), MB));
    m.x.need(rows * m.s.hidden);
    m.h.need(Left::size(m.s.hidden, int(std::max(rows, sampled))));
    m.qkv.need(rows * m.layers[0].qkv.n_pad);
    m.attended.need(Left::size(m.q_size(), int(rows)));
    m.act.need(Left::size(m.s.inter, int(rows)));
    plan_attention(m, *batch);
    place_logits(m, *batch);
    m.begin();
    m.mark = std::chrono::steady_clock::now();
    m.team.run([&](int id) {
      Forward forward{m, *batch};
      forward.run(id);
    });
    return 0;
  } catch (...) {
    return 1;
  }
}

// Attention alone, for tests and measurements: of queries float [tokens, heads, head_dim] that are turned already, with
// keys and values of a layer that are in the pool. 0, or 1 where memory does not suffice.
int pb_attend(void* handle, const PbBatch* batch, int layer, const float* queries, bf16* answers) {
  Model& m = *static_cast<Model*>(handle);
  try {
    const size_t width = m.q_size(), ldq = m.layers[0].qkv.n_pad;
    m.qkv.need(size_t(batch->tokens) * ldq);
    m.attended.need(Left::size(int(width), batch->tokens));
    for (int t = 0; t < batch->tokens; ++t) memcpy(m.qkv.p + t * ldq, queries + t * width, width * sizeof(float));
    plan_attention(m, *batch);
    m.begin();
    m.team.run([&](int id) {
      Attention attention(m, *batch, layer, m.space[id]);
      Shared work = Shared::queue(m.taken(0), int(m.plan.tasks.size()), 1, id);
      int from, to;
      while (work.take(from, to)) attention.run(m.plan.tasks[from], m.plan.after(from, m.team.size()));
      release_tiles();
    });
    const Left attended(m.attended.p, int(width), batch->tokens);
    for (int t = 0; t < batch->tokens; ++t)
      for (int c = 0; c < int(width); c += KB)
        memcpy(answers + t * width + c, attended.row(t).at(c), sizeof(bf16) * std::min(KB, int(width) - c));
    return 0;
  } catch (...) {
    return 1;
  }
}

// Seconds of each Stage since the last call, into double [STAGES].
void pb_take_seconds(void* handle, double* seconds) {
  Model& m = *static_cast<Model*>(handle);
  std::copy(m.seconds, m.seconds + STAGES, seconds);
  std::fill(m.seconds, m.seconds + STAGES, 0.0);
}

// See `project`. 0, or 1 where memory does not suffice.
int pb_project(void* handle, const float* hidden, int n, float* logits) {
  Model& m = *static_cast<Model*>(handle);
  try {
    m.h.need(Left::size(m.s.hidden, n));
    m.begin();
    m.team.run([&](int id) { project(m, hidden, n, logits, id); });
    return 0;
  } catch (...) {
    return 1;
  }
}

}  // extern "C"
