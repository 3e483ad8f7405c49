// What a forward pass adds to the residual: embeddings at first, then what layers put out, of several ranks as well.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "forward.h"
#include "model.h"
#include "ranks.h"
#include "team.h"

namespace {

// What the overlay has for a token, or null.
inline const float* Forward::embedded(int64_t token) const {
  const int64_t *begin = batch.embed_rows, *end = begin + batch.embed_count;
  const int64_t* at = std::lower_bound(begin, end, token);
  return at != end && *at == token ? batch.embeds + size_t(at - begin) * hidden : nullptr;
}

// What this rank knows of a token's embedding, zeros where another one has it.
inline void Forward::embed_one(int64_t token, float* x) const {
  const int64_t row = batch.ids[token] - shape.first_id;
  if (const float* given = embedded(token)) {
    if (shape.rank == 0) return void(memcpy(x, given, sizeof(float) * hidden));
  } else if (row >= 0 && row < shape.vocab) {
    const bf16* from = model.embedding + size_t(row) * hidden;
    for (int i = 0; i < hidden; ++i) x[i] = to_float(from[i]);
    return;
  }
  memset(x, 0, sizeof(float) * hidden);
}

// Adds to the residual what all ranks write for each token. `write(first, rows, to)` writes this rank's part for `rows`
// tokens from `first` on. Threads meet before anything else reads the residual.
template <class F>
inline void Forward::add_ranks(F&& write) {
  for (int first = 0; first < tokens; first += Ranks::ROWS, ++sum) {
    const int rows = std::min(Ranks::ROWS, tokens - first);
    write(first, rows, model.ranks.own_slot(sum));
    model.team.barrier();
    if (id == 0) model.ranks.tell(sum);
    model.ranks.wait(sum, id == 0);
    int from, to;
    for (Shared work = share(rows, std::max(1, rows / (threads * 8))); work.take(from, to);)
      for (int i = from; i < to; ++i) model.ranks.add(sum, i, residual(first + i));
  }
}

inline void Forward::embed() {
  const bool alone = model.ranks.size() == 1;
  each_token([&](int t) {
    // What no number is written to, where sizes are odd.
    attended.row(t).zero_from(model.q_size());
    act.row(t).zero_from(shape.inter);
    if (alone)
      embed_one(t, residual(t));
    else
      memset(residual(t), 0, sizeof(float) * hidden);
  });
  if (!alone)
    add_ranks([&](int first, int rows, float* to) {
      int from, end;
      for (Shared work = share(rows, few()); work.take(from, end);)
        for (int i = from; i < end; ++i) embed_one(first + i, to + size_t(i) * hidden);
    });
  meet(EMBED);
}

inline void Forward::add_to_residual(Site site, const Left& a, const Matrix& w, const std::vector<float>& all_bias,
                                     const Matrix* next) {
  // Has rows of `to` `take` the sums and the bias of a block of columns.
  const auto put = [&](float* to, int rows, int nb, const float* sums, auto&& take) {
    const int columns = std::min(NB, hidden - nb * NB);
    const float* bias = bias_of_block(all_bias, nb);
    for (int i = 0; i < rows; ++i) {
      float* out = to + size_t(i) * hidden + nb * NB;
      for (int j = 0; j < columns; ++j) take(out[j], sums[i * NB + j] + (bias ? bias[j] : 0.0f));
    }
  };
  if (model.ranks.size() == 1)
    return multiply_at(site, a, w, next, [&](int r, int rows, int nb, const float* sums) {
      put(residual(r), rows, nb, sums, [](float& out, float x) { out += x; });
    });
  add_ranks([&](int first, int some, float* slot) {
    multiply(a.from(first), some, w, next, [&](int r, int rows, int nb, const float* sums) {
      put(slot + size_t(r) * hidden, rows, nb, sums, [](float& out, float x) { out = x; });
    });
  });
}

// The overlay's states of this level join the output of layer `l`.
inline void Forward::deepen(int l) {
  const float* level = batch.deep + size_t(l) * batch.embed_count * hidden;
  Shared work = share(batch.embed_count, std::max(1, batch.embed_count / (threads * 8)));
  int from, to;
  while (work.take(from, to))
    for (int i = from; i < to; ++i) {
      float* x = residual(batch.embed_rows[i]);
      const float* state = level + size_t(i) * hidden;
      for (int j = 0; j < hidden; ++j) x[j] += state[j];
    }
  meet(DOWN);
}

}  // namespace
