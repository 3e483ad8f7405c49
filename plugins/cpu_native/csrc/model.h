// A decoder: its shape, its weights, and what its forward pass needs besides.
#pragma once

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <vector>

#include "memory.h"
#include "numbers.h"
#include "plan.h"
#include "product.h"
#include "ranks.h"
#include "sampling.h"
#include "team.h"

extern "C" {

// Where there are several `ranks`, sizes are those of this one's share: it has the `vocab` rows of embeddings and head
// from `first_id` on.
struct PbShape {
  int32_t vocab, hidden, inter, layers, heads, kv_heads, head_dim, act, qk_norm, threads, wanted, experts, per_token,
      expert_inter, normalised, ranks, rank, first_id;
  float eps, scale;
};

// A matrix as it comes: `numbers` are bf16 [rows, columns], or where there are `words`, codes of the Format that
// CodedRow describes, and `words` [rows, columns / group], of a single column where `group` is 0.
struct PbWeights {
  const void* numbers;
  const uint32_t* words;
  int32_t group, format;
};

struct PbVectors {
  const float *norm1, *norm2, *q_norm, *k_norm, *q_bias, *k_bias, *v_bias, *o_bias, *gate_bias, *up_bias, *down_bias,
      *router;
  int32_t window;
};

// What an adapter adds at a site, x * a^T * b^T. `a` is bf16 [ranks / 16, steps of 32 columns, 16 pairs, 16 rows, 2],
// with zeros where there are no ranks or columns, at a multiple of 64 bytes. `b` has of every 16 rows of the packed
// matrix those ranks that they need, [ranks, 16 rows]: `halves` [rows / 16][3] says which is the first, how many there
// are, and where they begin in `b`, in units of 16 numbers. Where `ranks` is 0 it adds nothing.
struct PbLowRank {
  const bf16 *a, *b;
  const int32_t* halves;
  int32_t ranks;
};

// What `count` adapters add, each an array of PbLowRank by site: layer * 4 + Site. `which` [tokens] says which adapter
// a token has, below 0 for none; `order` has the tokens of the first one, of the second, and so on, ascending, `begin`
// [count + 1] where they begin in it, and `place` [tokens] where each token is in it. No adapter has more than
// `most_ranks` at a site.
struct PbAdditions {
  int32_t count, most_ranks;
  const PbLowRank* const* adapters;
  const int32_t *which, *order, *begin, *place;
};

// Arrays as in ForwardBatch; `starts` has batch + 1 entries. cos and sin are float [tokens, head_dim / 2].
//
// Its overlay: `embeds` float [embed_count, hidden] stand in for the embeddings of the tokens `embed_rows`, which are
// in ascending order, and `deep` float [deep_levels, embed_count, hidden] are added to the outputs of the first layers
// there. Without one both counts are 0.
//
// `tails` [batch] and `bits` [tokens] are its tail_lens and tail_bits, or null.
//
// Its taps: the states of all tokens at the `tap_places`, which are in ascending order, go to `tapped`. Place l is
// the input of layer l; the number of layers is the output of the last one, and one more what comes after the final
// norm. Without taps the count is 0.
struct PbBatch {
  int32_t tokens, batch, sampled, hidden_count, embed_count, deep_levels, tap_count;
  const int64_t *ids, *rows, *seq_lens, *starts, *out_loc, *logits_indices, *hidden_rows, *embed_rows, *tails, *bits;
  const float *embeds, *deep, *cos, *sin;
  const int32_t *table, *tap_places;
  int64_t table_stride;
  bf16* const* keys;
  bf16* const* values;
  float* logits;                 // [sampled, vocab], or null
  int64_t* drawn;                // [sampled]: what is sampled, or a Failure; null where only the logits are wanted
  const PbSampling* sampling;    // of the sampled rows; null where all are greedy
  float* hidden;                 // [hidden_count, hidden]: after the final norm, or null
  bf16* tapped;                  // [tap_count, tokens, hidden]
  const PbAdditions* additions;  // or null
};

}  // extern "C"

namespace {

// Parts of a forward pass, each between two meetings of all threads.
enum Stage { EMBED, QKV, ROPE, ATTENTION, OUT, NORM, GATE_UP, DOWN, HEAD, SAMPLE, STAGES };

// Matrices of a model: those of a layer, and the one that makes logits.
enum Site { SITE_QKV = 0, SITE_O = 1, SITE_GATE_UP = 2, SITE_DOWN = 3, SITE_HEAD = 4 };
constexpr int LAYER_SITES = 4;

struct Expert {
  Matrix gate_up, down;
};

// With `experts` it has no gate_up and down of its own, and `router` float [experts, hidden].
struct Layer {
  Matrix qkv, o, gate_up, down;
  std::vector<Expert> experts;
  std::vector<float> norm1, norm2, q_norm, k_norm, qkv_bias, o_bias, gate_up_bias, down_bias, router;
  int window = 0;
};

struct Best {
  float value;
  int32_t id;
};

// Pairs of a token and one of its experts, number token * per_token + place, in the order of experts and then of
// tokens. Of the experts that have some, one after the other: their number, where their pairs begin, where the rows of
// their activations begin in memory, and the first of their items of work.
struct Pairs {
  std::vector<int> order, experts, begin, item;
  std::vector<size_t> rows;
  int count(int one) const { return begin[one + 1] - begin[one]; }
};

struct ThreadSpace {
  Pairs pairs;
  Buffer<int32_t> chosen;
  Buffer<Best> best;
  SampleSpace sample;
  ProductSpace product;
  Buffer<float> scores, sums, single, joined, best_score, total, shares, routed;
  Buffer<bf16> normed, queries, keys, values, weights, gathered;
};

struct Model {
  PbShape shape;
  Team team;
  Ranks ranks;
  Arena arena;
  std::vector<Layer> layers;
  std::vector<float> final_norm;
  Matrix head;
  const bf16* embedding = nullptr;
  std::vector<ThreadSpace> space;
  Plan plan;                      // of the attention of this step
  std::vector<float*> logits_to;  // of each sampled row
  Buffer<float> residual, qkv, parts, own_logits, shares, small;
  Buffer<bf16> normed, attended, act, expert_act;
  Buffer<int32_t> chosen;
  std::vector<std::atomic<int>> counters;  // see `taken`
  double seconds[STAGES] = {};             // of all passes since the last question
  std::chrono::steady_clock::time_point mark;

  explicit Model(const PbShape& shape)
      : shape(shape), team(shape.threads), ranks(shape.ranks, shape.rank, shape.hidden), layers(shape.layers),
        space(shape.threads) {
    need_counters(0);
  }

  // Enough for a pass of so many tokens: ranks add up some of them at a time.
  void need_counters(int tokens) {
    const size_t pieces = ranks.size() > 1 ? (tokens + Ranks::ROWS - 1) / Ranks::ROWS : 0;
    const size_t wanted = (shape.layers * (18 + 4 * pieces) + 10 + 2 * pieces) * shape.threads;
    if (counters.size() < wanted) counters = std::vector<std::atomic<int>>(wanted);
  }

  // For one run of work after the other.
  Taken taken(int which) { return &counters[size_t(which) * shape.threads]; }
  void begin() {
    for (auto& one : counters) one.store(0, std::memory_order_relaxed);
  }

  int q_size() const { return shape.heads * shape.head_dim; }
  int kv_size() const { return shape.kv_heads * shape.head_dim; }
  int group() const { return shape.heads / shape.kv_heads; }
};

}  // namespace
