// One forward pass of a dense decoder (Llama, Mistral, Qwen2, Qwen3) on a CPU, over paged KV, in one call.
//
// All threads run the same program and meet at barriers; between two of them they take pieces of the work from a counter,
// so that a thread whose core is wanted elsewhere does less. Weights and KV are bf16, sums and the residual are float32.
//
// Compiled once per instruction set: PB_AMX (tiles; implies AVX-512 and its bf16 dot product), PB_AVX512 (the latter
// alone), or neither (whatever the compiler vectorises of plain loops).


#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <sys/syscall.h>
#include <unistd.h>

#include "attention.h"
#include "matrix.h"
#include "model.h"
#include "numbers.h"
#include "sampler.h"
#include "team.h"

namespace {

struct Forward {
  Model& m;
  const PbBatch& b;
  int phase = 0;  // each thread counts for itself, all alike

  Shared share(int& counter, int total, int piece) { return Shared{m.counters[counter++], total, std::max(1, piece)}; }

  void rows_normed(Shared work, const std::vector<float>& weight) {
    const int hidden = m.s.hidden, ldh = m.head.k_pad;
    int from, to;
    while (work.take(from, to))
      for (int t = from; t < to; ++t)
        rms_norm(m.x.p + size_t(t) * hidden, weight.data(), hidden, m.s.eps, m.h.p + size_t(t) * ldh);
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
  float* c = space.c.need(MB * NB);
  const int tokens = b.tokens, hidden = s.hidden, ldh = m.head.k_pad, threads = m.team.size();
  const int ldq = m.layers[0].qkv.n_pad, ldo = m.layers[0].o.k_pad, lda = m.layers[0].down.k_pad;
  const bool only_decodes = tokens == b.batch;
  const int per_block = std::max(1, MB / m.group());  // tokens whose heads fill a block of rows
  std::vector<int> block_of;                          // (request, first token) pairs of extends, in pieces
  for (int r = 0; r < b.batch; ++r) {
    const int count = int(b.starts[r + 1] - b.starts[r]);
    for (int t = 0; t < count; t += count == 1 ? 1 : per_block) block_of.insert(block_of.end(), {r, t});
  }
  const int blocks = int(block_of.size()) / 2;
  const int few = std::max(1, tokens / (threads * 4));
  int counter = 0, from, to;
  {
    Shared work = share(counter, tokens, few);
    while (work.take(from, to))
      for (int t = from; t < to; ++t) {
        float* x = m.x.p + size_t(t) * hidden;
        if (b.embeds) {
          memcpy(x, b.embeds + size_t(t) * hidden, sizeof(float) * hidden);
        } else {
          const bf16* e = m.embedding + size_t(b.ids[t]) * hidden;
          for (int i = 0; i < hidden; ++i) x[i] = to_float(e[i]);
        }
        rms_norm(x, m.layers[0].norm1.data(), hidden, s.eps, m.h.p + size_t(t) * ldh);
      }
  }
  meet(id, EMBED);
  for (int l = 0; l < s.layers; ++l) {
    const Layer& layer = m.layers[l];
    const auto pieces = [&](const Matrix& w) { return std::max(1, w.n_pad / NB / (threads * 6)); };
    product(share(counter, layer.qkv.n_pad / NB, pieces(layer.qkv)), m.h.p, ldh, tokens, layer.qkv, c,
            [&](int r, int rows, int nb, const float* sums) {
              const float* bias = layer.qkv_bias.empty() ? nullptr : layer.qkv_bias.data() + nb * NB;
              for (int i = 0; i < rows; ++i) {
                float* out = m.qkv.p + size_t(r + i) * ldq + nb * NB;
                for (int j = 0; j < NB; ++j) out[j] = sums[i * NB + j] + (bias ? bias[j] : 0.0f);
              }
            });
    meet(id, QKV);
    if (!only_decodes) {
      Shared work = share(counter, tokens, few);
      while (work.take(from, to))
        for (int t = from; t < to; ++t)
          for (int kvh = 0; kvh < s.kv_heads; ++kvh) enter_head(layer, l, t, kvh);
      meet(id, ROPE);
    }
    {
      // The longest contexts come last in a prompt: with small pieces nobody waits long for the others.
      Shared work = share(counter, blocks * s.kv_heads, only_decodes ? std::max(1, blocks * s.kv_heads / (threads * 8)) : 1);
      while (work.take(from, to))
        for (int i = from; i < to; ++i) {
          const int r = block_of[i / s.kv_heads * 2], first = block_of[i / s.kv_heads * 2 + 1], kvh = i % s.kv_heads;
          const int count = int(b.starts[r + 1] - b.starts[r]);
          if (count == 1) {
            if (only_decodes) enter_head(layer, l, int(b.starts[r]), kvh);
            attend_one(m, b, l, r, kvh, space);
          } else {
            attend_block(m, b, l, r, kvh, first, std::min(per_block, count - first), space);
          }
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
    product(share(counter, layer.o.n_pad / NB, pieces(layer.o)), m.attended.p, ldo, tokens, layer.o, c, add(layer.o_bias));
    meet(id, OUT);
    rows_normed(share(counter, tokens, few), layer.norm2);
    meet(id, NORM);
    product(share(counter, layer.gate_up.n_pad / NB, pieces(layer.gate_up)), m.h.p, ldh, tokens, layer.gate_up, c,
            [&](int r, int rows, int nb, const float* sums) {
              // 16 columns of the gate, then the same 16 of the other.
              const float* bias = layer.gate_up_bias.empty() ? nullptr : layer.gate_up_bias.data() + nb * NB;
              const int columns = std::min(16, s.inter - nb * 16);
              for (int i = 0; i < rows; ++i) {
                bf16* out = m.act.p + size_t(r + i) * lda + nb * 16;
                const float* row = sums + i * NB;
#ifdef PB_AVX512
                if (s.act == SILU && columns == 16 && !bias) {
                  const __m512 gate = _mm512_loadu_ps(row), up = _mm512_loadu_ps(row + 16), one = _mm512_set1_ps(1.0f);
                  // x * sigmoid(x), with e^-|x| so that nothing overflows.
                  const __m512 e = exp512(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(gate)));
                  const __mmask16 negative = _mm512_cmp_ps_mask(gate, _mm512_setzero_ps(), _CMP_LT_OQ);
                  const __m512 sigmoid = _mm512_div_ps(_mm512_mask_mov_ps(one, negative, e), _mm512_add_ps(one, e));
                  const __m512 y = _mm512_mul_ps(_mm512_mul_ps(gate, sigmoid), up);
                  _mm256_storeu_si256((__m256i*)out, (__m256i)_mm512_cvtneps_pbh(y));
                  continue;
                }
#endif
                for (int j = 0; j < columns; ++j) {
                  const float gate = row[j] + (bias ? bias[j] : 0.0f), up = row[16 + j] + (bias ? bias[16 + j] : 0.0f);
                  out[j] = to_bf16(activate(gate, s.act) * up);
                }
              }
            });
    meet(id, GATE_UP);
    product(share(counter, layer.down.n_pad / NB, pieces(layer.down)), m.act.p, lda, tokens, layer.down, c,
            add(layer.down_bias));
    meet(id, DOWN);
    if (l + 1 < s.layers) {
      rows_normed(share(counter, tokens, few), m.layers[l + 1].norm1);
      meet(id, NORM);
    }
  }
  if (b.hidden) {
    Shared work = share(counter, b.hidden_count, 4);
    while (work.take(from, to))
      for (int i = from; i < to; ++i) {
        const float* x = m.x.p + size_t(b.hidden_rows[i]) * hidden;
        float sum = 0;
        for (int j = 0; j < hidden; ++j) sum += x[j] * x[j];
        const float scale = 1.0f / std::sqrt(sum / hidden + s.eps);
        for (int j = 0; j < hidden; ++j) b.hidden[size_t(i) * hidden + j] = x[j] * scale * m.final_norm[j];
      }
  }
  if (b.logits || b.greedy) {
    {
      // Sampled rows move to the front of `h`, which nobody reads any more.
      Shared work = share(counter, b.sampled, 4);
      while (work.take(from, to))
        for (int i = from; i < to; ++i)
          rms_norm(m.x.p + size_t(b.sample_rows ? b.sample_rows[i] : i) * hidden, m.final_norm.data(), hidden, s.eps,
                   m.h.p + size_t(i) * ldh);
    }
    Best* best = space.best.need(size_t(b.sampled));
    for (int i = 0; i < b.sampled; ++i) best[i] = {-INFINITY, INT32_MAX};
    meet(id, NORM);
    product(share(counter, m.head.n_pad / NB, 8), m.h.p, ldh, b.sampled, m.head, c,
            [&](int r, int rows, int nb, const float* sums) {
              const int columns = std::min(NB, s.vocab - nb * NB);
              for (int i = 0; i < rows; ++i) {
                const float* row = sums + i * NB;
                if (b.logits) memcpy(b.logits + size_t(r + i) * s.vocab + nb * NB, row, sizeof(float) * columns);
                if (!b.greedy) continue;
                Best& found = best[r + i];
                int at = 0;
                for (int j = 1; j < columns; ++j) at = row[j] > row[at] ? j : at;
                const int32_t id = nb * NB + at;
                // Blocks come in any order: of equal ones the first token wins. A NaN is nobody's largest.
                if (row[at] > found.value || (row[at] == found.value && id < found.id)) found = {row[at], id};
              }
            });
    meet(id, HEAD);
    if (b.greedy) {
      if (id == 0)
        for (int i = 0; i < b.sampled; ++i) {
          Best found{-INFINITY, INT32_MAX};
          for (auto& one : m.space) {
            const Best& other = one.best.p[i];
            if (other.value > found.value || (other.value == found.value && other.id < found.id)) found = other;
          }
          b.greedy[i] = found.id == INT32_MAX ? -1 : found.id;
        }
    }
  }
  release_tiles();
}

// Logits float [n, vocab] of hidden states float [n, hidden] as `hidden` of a batch has them.
void project(Model& m, const float* hidden, int n, float* logits, int id) {
  ThreadSpace& space = m.space[id];
  float* c = space.c.need(MB * NB);
  const int ldh = m.head.k_pad;
  Shared rows{m.counters[0], n, 4};
  int from, to;
  while (rows.take(from, to))
    for (int i = from; i < to; ++i) floats_to_bf16(hidden + size_t(i) * m.s.hidden, m.h.p + size_t(i) * ldh, m.s.hidden);
  m.team.barrier();
  product(Shared{m.counters[1], m.head.n_pad / NB, 8}, m.h.p, ldh, n, m.head, c,
          [&](int r, int count, int nb, const float* sums) {
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
int pb_prepare() {
#ifdef PB_AMX
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)) return errno;
#endif
  return 0;
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
    std::vector<const bf16*> rows;
    for (int i = 0; i < q; ++i) rows.push_back(w->q + size_t(i) * hidden);
    for (int i = 0; i < kv; ++i) rows.push_back(w->k + size_t(i) * hidden);
    for (int i = 0; i < kv; ++i) rows.push_back(w->v + size_t(i) * hidden);
    layer.qkv.pack(rows.data(), q + 2 * kv, hidden);
    rows.clear();
    for (int i = 0; i < hidden; ++i) rows.push_back(w->o + size_t(i) * q);
    layer.o.pack(rows.data(), hidden, q);
    rows.clear();
    const int inter = s.inter, inter16 = round_up(inter, 16);
    for (int i = 0; i < inter16; i += 16)
      for (const bf16* one : {w->gate, w->up})
        for (int j = 0; j < 16; ++j) rows.push_back(i + j < inter ? one + size_t(i + j) * hidden : nullptr);
    layer.gate_up.pack(rows.data(), int(rows.size()), hidden);
    rows.clear();
    for (int i = 0; i < hidden; ++i) rows.push_back(w->down + size_t(i) * inter);
    layer.down.pack(rows.data(), hidden, inter);
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
    std::vector<const bf16*> rows;
    for (int i = 0; i < m.s.vocab; ++i) rows.push_back(head + size_t(i) * m.s.hidden);
    m.head.pack(rows.data(), m.s.vocab, m.s.hidden);
    keep(m.final_norm, final_norm, m.s.hidden, m.s.hidden);
    return 0;
  } catch (...) {
    return 1;
  }
}

// One forward pass. 0, or 1 where memory does not suffice.
int pb_forward(void* handle, const PbBatch* batch) {
  Model& m = *static_cast<Model*>(handle);
  try {
    const size_t rows = size_t(round_up(batch->tokens, MB)), sampled = size_t(round_up(std::max(1, batch->sampled), MB));
    m.x.need(rows * m.s.hidden);
    m.h.need(std::max(rows, sampled) * m.head.k_pad);
    m.qkv.need(rows * m.layers[0].qkv.n_pad);
    m.attended.need(rows * m.layers[0].o.k_pad);
    m.act.need(rows * m.layers[0].down.k_pad);
    for (auto& one : m.counters) one.store(0, std::memory_order_relaxed);
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
    m.h.need(size_t(round_up(n, MB)) * m.head.k_pad);
    for (auto& one : m.counters) one.store(0, std::memory_order_relaxed);
    m.team.run([&](int id) { project(m, hidden, n, logits, id); });
    return 0;
  } catch (...) {
    return 1;
  }
}

}  // extern "C"

