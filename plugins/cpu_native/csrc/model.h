// A decoder: its shape, its weights, what its forward pass needs besides, and small operations on rows.
#pragma once

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <vector>

#include "numbers.h"
#include "plan.h"
#include "product.h"
#include "sampling.h"
#include "team.h"

extern "C" {

struct PbShape {
  int32_t vocab, hidden, inter, layers, heads, kv_heads, head_dim, act, qk_norm, threads, wanted;
  float eps, scale;
};

struct PbLayerWeights {
  const bf16 *q, *k, *v, *o, *gate, *up, *down;
  const float *norm1, *norm2, *q_norm, *k_norm, *q_bias, *k_bias, *v_bias, *o_bias, *gate_bias, *up_bias, *down_bias;
  int32_t window;
};

// Arrays as in ForwardBatch; `starts` has batch + 1 entries. cos and sin are float [tokens, head_dim / 2].
struct PbBatch {
  int32_t tokens, batch, sampled, hidden_count;
  const int64_t *ids, *rows, *seq_lens, *starts, *out_loc, *sample_rows, *hidden_rows;
  const float *embeds, *cos, *sin;
  const int32_t* table;
  int64_t table_stride;
  bf16* const* keys;
  bf16* const* values;
  float* logits;               // [sampled, vocab], or null
  int64_t* drawn;              // [sampled]: what is sampled, or a Failure; null where only the logits are wanted
  const PbSampling* sampling;  // of the sampled rows; null where all are greedy
  float* hidden;               // [hidden_count, hidden]: after the final norm, or null
};

}  // extern "C"

namespace {

// Parts of a forward pass, each between two meetings of all threads.
enum Stage { EMBED, QKV, ROPE, ATTENTION, OUT, NORM, GATE_UP, DOWN, HEAD, SAMPLE, STAGES };

enum Activation { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3 };

inline float activate(float x, int kind) {
  switch (kind) {
    case SILU: return x / (1.0f + std::exp(-x));
    case GELU: return 0.5f * x * (1.0f + std::erf(x * 0.70710678f));
    case GELU_TANH: return 0.5f * x * (1.0f + std::tanh(0.79788456f * (x + 0.044715f * x * x * x)));
    default: return x > 0 ? x : 0;
  }
}

struct Layer {
  Matrix qkv, o, gate_up, down;
  std::vector<float> norm1, norm2, q_norm, k_norm, qkv_bias, o_bias, gate_up_bias, down_bias;
  int window = 0;
};

struct Best {
  float value;
  int32_t id;
};

struct ThreadSpace {
  Buffer<Best> best;
  SampleSpace sample;
  ProductSpace product;
  Buffer<float> scores, sums, single, joined, best_score, total;
  Buffer<bf16> h, q, k, v, probs;
};

struct Model {
  PbShape s;
  Team team;
  Arena arena;
  std::vector<Layer> layers;
  std::vector<float> final_norm;
  Matrix head;
  const bf16* embedding = nullptr;
  std::vector<ThreadSpace> space;
  Plan plan;                      // of the attention of this step
  std::vector<float*> logits_to;  // of each sampled row
  Buffer<float> x, qkv, parts, own_logits;
  Buffer<bf16> h, attended, act;
  std::vector<std::atomic<int>> counters;  // see `taken`
  double seconds[STAGES] = {};             // of all passes since somebody asked
  std::chrono::steady_clock::time_point mark;

  explicit Model(const PbShape& shape)
      : s(shape), team(shape.threads), layers(shape.layers), space(shape.threads),
        counters((size_t(shape.layers) * 9 + 8) * shape.threads) {}

  // For one run of work after the other.
  Taken taken(int which) { return &counters[size_t(which) * s.threads]; }
  void begin() {
    for (auto& one : counters) one.store(0, std::memory_order_relaxed);
  }

  int q_size() const { return s.heads * s.head_dim; }
  int kv_size() const { return s.kv_heads * s.head_dim; }
  int group() const { return s.heads / s.kv_heads; }
};

// out[i] = x[i] / rms(x) * weight[i]
inline void rms_norm(const float* x, const float* weight, int n, float eps, const Left::Row& out) {
  float sum = 0;
  int i = 0;
#ifdef PB_AVX512
  __m512 acc = _mm512_setzero_ps();
  for (; i + 16 <= n; i += 16) {
    const __m512 v = _mm512_loadu_ps(x + i);
    acc = _mm512_fmadd_ps(v, v, acc);
  }
  sum = _mm512_reduce_add_ps(acc);
#endif
  for (; i < n; ++i) sum += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(sum / n + eps);
  i = 0;
#ifdef PB_AVX512
  const __m512 factor = _mm512_set1_ps(scale);
  for (; i + 16 <= n; i += 16) {
    const __m512 v = _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), factor), _mm512_loadu_ps(weight + i));
    _mm256_storeu_si256((__m256i*)out.at(i), (__m256i)_mm512_cvtneps_pbh(v));
  }
#endif
  for (; i < n; ++i) *out.at(i) = to_bf16(x[i] * scale * weight[i]);
  out.zero_from(n);
}

// A head's vector: normalised where the model does that, then turned.
inline void turn(float* v, const float* norm, const float* cos, const float* sin, int dim, float eps) {
  if (norm) {
    float sum = 0;
    int i = 0;
#ifdef PB_AVX512
    __m512 acc = _mm512_setzero_ps();
    for (; i + 16 <= dim; i += 16) acc = _mm512_fmadd_ps(_mm512_loadu_ps(v + i), _mm512_loadu_ps(v + i), acc);
    sum = _mm512_reduce_add_ps(acc);
#endif
    for (; i < dim; ++i) sum += v[i] * v[i];
    const float scale = 1.0f / std::sqrt(sum / dim + eps);
    i = 0;
#ifdef PB_AVX512
    const __m512 by = _mm512_set1_ps(scale);
    for (; i + 16 <= dim; i += 16)
      _mm512_storeu_ps(v + i, _mm512_mul_ps(_mm512_loadu_ps(v + i), _mm512_mul_ps(by, _mm512_loadu_ps(norm + i))));
#endif
    for (; i < dim; ++i) v[i] *= scale * norm[i];
  }
  const int half = dim / 2;
  int i = 0;
#ifdef PB_AVX512
  for (; i + 16 <= half; i += 16) {
    const __m512 a = _mm512_loadu_ps(v + i), b = _mm512_loadu_ps(v + i + half);
    const __m512 c = _mm512_loadu_ps(cos + i), s = _mm512_loadu_ps(sin + i);
    _mm512_storeu_ps(v + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
    _mm512_storeu_ps(v + i + half, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
  }
#endif
  for (; i < half; ++i) {
    const float a = v[i], b = v[i + half];
    v[i] = a * cos[i] - b * sin[i];
    v[i + half] = b * cos[i] + a * sin[i];
  }
}

}  // namespace
