// One forward pass of a decoder (Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, Mixtral, the text of Qwen-VL) on a CPU, over
// paged KV, in one call.
//
// All threads run the same program and meet at barriers; between two of them they take pieces of the work from a
// counter, so that a thread whose core is wanted elsewhere does less. Weights and KV are bf16, sums and the residual
// are float32.
//
// Compiled once per instruction set, see instruction_set.h, and always as one unit. So all of it stands in unnamed
// namespaces: the compiler sees what is called from one place only, and may inline it.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <vector>

#include "adapters.h"
#include "attention.h"
#include "experts.h"
#include "forward.h"
#include "fused.h"
#include "model.h"
#include "numbers.h"
#include "pack_layer.h"
#include "product.h"
#include "residual.h"
#include "sampler.h"
#include "team.h"

namespace {

void plan_attention(Model& m, const PbBatch& b) {
  m.plan.make({b.rows, b.seq_lens, b.starts, b.tails, b.bits, b.table, b.table_stride, b.batch, b.tokens,
               m.shape.kv_heads, m.group(), m.team.size()});
  m.parts.need(size_t(m.plan.total_parts) * m.shape.heads * Attention::part_size(m.shape));
}

// Logits float [n, vocab] of hidden states float [n, hidden] as `hidden` of a batch has them.
void project(Model& m, const float* hidden, int n, float* logits, int id) {
  const Left h(m.normed.data, m.shape.hidden, n);
  const Division division(m.head, n, m.team.size());
  Shared rows = Shared::queue(m.taken(0), n, 4, id);
  int from, to;
  while (rows.take(from, to))
    for (int i = from; i < to; ++i) {
      const Left::Row row = h.row(i);
      for (int c = 0; c < m.shape.hidden; c += KB)
        floats_to_bf16(hidden + size_t(i) * m.shape.hidden + c, row.at(c), std::min(KB, m.shape.hidden - c));
      row.zero_from(m.shape.hidden);
    }
  m.team.barrier();
  product(Shared::parts(m.taken(1), division.items(), division.part, 0, 8, m.team.size(), id), division, h, n, m.head,
          m.space[id].product, [&](int r, int count, int nb, const float* sums) {
            const int columns = std::min(NB, m.shape.vocab - nb * NB);
            for (int i = 0; i < count; ++i)
              memcpy(logits + size_t(r + i) * m.shape.vocab + nb * NB, sums + i * NB, sizeof(float) * columns);
          });
  release_tiles();
}

}  // namespace

extern "C" {

// 0, or an errno: the kernel must allow a process to use tiles.
int pb_prepare() { return allow_tiles(); }

// One product, for tests and measurements: out float [m, n] = a bf16 [m, k] * (w [n, k], kept as `wanted`)^T. The
// Format that it came to be in, or -1 where memory does not suffice.
int pb_multiply(int threads, int wanted, const PbWeights* w, int n, int k, const bf16* a, int m, float* out) {
  try {
    Team team(threads);
    Arena arena;
    Matrix matrix;
    pack_parts(team, arena, matrix, n, k, Wanted(wanted), w, 1, [](int i) { return At{0, i}; });
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

// Copies, packed, of a layer's matrix, or that of an expert unless its number is below 0, or the head. 0, or 1 where
// memory does not suffice.
int pb_set_matrix(void* handle, int layer, int site, int expert, const PbWeights* parts) {
  try {
    pack_site(*static_cast<Model*>(handle), layer, Site(site), expert, parts);
    return 0;
  } catch (...) {
    return 1;
  }
}

// Copies, of what else a layer has once its matrices are there. 0, or 1 where memory does not suffice.
int pb_set_vectors(void* handle, int index, const PbVectors* w) {
  try {
    Model& m = *static_cast<Model*>(handle);
    keep_vectors(m, m.layers[index], *w);
    m.layers[index].window = w->window;
    return 0;
  } catch (...) {
    return 1;
  }
}

// `embedding` [vocab, hidden] is not copied and must live as long as the model.
int pb_set_ends(void* handle, const bf16* embedding, const float* final_norm) {
  try {
    Model& m = *static_cast<Model*>(handle);
    m.embedding = embedding;
    keep(m.final_norm, final_norm, m.shape.hidden, m.shape.hidden);
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
    for (const Expert& expert : layer.experts) {
      count(expert.gate_up);
      count(expert.down);
    }
  }
  count(m.head);
}

// Of several ranks: bytes of the memory that all of them map.
int64_t pb_ranks_bytes(void* handle) { return static_cast<Model*>(handle)->ranks.bytes(); }

// To be called before the first pass of several ranks. `memory`: zeros that all ranks map. `lost`: asked while a thread
// waits, see Ranks::join. Both must live as long as the model.
void pb_join(void* handle, void* memory, int32_t (*lost)(double)) {
  static_cast<Model*>(handle)->ranks.join(static_cast<uint8_t*>(memory), lost);
}

// For measurements: one sum alone. x float [rows, hidden], at most Ranks::ROWS rows, becomes the sum of all ranks' x.
// 0, or 2 where another rank is lost.
int pb_sum(void* handle, float* x, int rows) {
  Model& m = *static_cast<Model*>(handle);
  const uint32_t sum = m.ranks.next++;
  const size_t bytes = size_t(rows) * m.shape.hidden * sizeof(float);
  memcpy(m.ranks.own_slot(sum), x, bytes);
  m.ranks.tell(sum);
  m.ranks.wait(sum, true);
  memset(x, 0, bytes);
  for (int i = 0; i < rows; ++i) m.ranks.add(sum, i, x + size_t(i) * m.shape.hidden);
  return m.ranks.lost() ? 2 : 0;
}

// One forward pass. 0, 1 where memory does not suffice, or 2 where another rank is lost.
int pb_forward(void* handle, const PbBatch* batch) {
  Model& m = *static_cast<Model*>(handle);
  try {
    const size_t rows = size_t(round_up(batch->tokens, MB)),
                 sampled = size_t(round_up(std::max(1, batch->sampled), MB));
    m.residual.need(rows * m.shape.hidden);
    m.normed.need(Left::size(m.shape.hidden, int(std::max(rows, sampled))));
    m.qkv.need(rows * m.layers[0].qkv.n_pad);
    m.attended.need(Left::size(m.q_size(), int(rows)));
    m.act.need(Left::size(m.shape.inter, int(rows)));
    if (batch->additions) m.small.need(size_t(batch->tokens) * batch->additions->most_ranks);
    if (m.shape.experts) {
      m.chosen.need(rows * m.shape.per_token);
      m.shares.need(rows * m.shape.per_token);
      m.expert_act.need(most_rows(m.shape, batch->tokens) * round_up(m.shape.expert_inter, KB));
    }
    plan_attention(m, *batch);
    place_logits(m, *batch);
    m.need_counters(batch->tokens);
    m.begin();
    m.mark = std::chrono::steady_clock::now();
    m.team.run([&](int id) { Forward(m, *batch, id).run(); });
    return m.ranks.lost() ? 2 : 0;
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
    for (int t = 0; t < batch->tokens; ++t) memcpy(m.qkv.data + t * ldq, queries + t * width, width * sizeof(float));
    plan_attention(m, *batch);
    m.begin();
    m.team.run([&](int id) {
      Attention attention(m, *batch, layer, m.space[id]);
      Shared work = Shared::queue(m.taken(0), int(m.plan.tasks.size()), 1, id);
      int from, to;
      while (work.take(from, to)) attention.run(m.plan.tasks[from], m.plan.after(from, m.team.size()));
      release_tiles();
    });
    const Left attended(m.attended.data, int(width), batch->tokens);
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
    m.normed.need(Left::size(m.shape.hidden, n));
    m.begin();
    m.team.run([&](int id) { project(m, hidden, n, logits, id); });
    return 0;
  } catch (...) {
    return 1;
  }
}

}  // extern "C"
