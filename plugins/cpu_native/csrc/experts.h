// The experts of a layer in place of an MLP: their part of Forward.
//
// An expert multiplies the tokens that were sent to it, whose rows are gathered for it. Threads share its blocks of
// gate and up; then each takes blocks of the hidden size and goes through all experts with them, in order, so that only
// one thread adds to a number of the residual, and the sum does not depend on who is first. Only the weights of experts
// that some token goes to are read.
#pragma once

#include <algorithm>

#include "forward.h"

namespace {

// Norms and routes all tokens. A few every thread routes for itself: that is sooner done than meeting once more.
inline Routed Forward::route(const Layer& layer) {
  constexpr int FEW = 4;
  const int pairs = tokens * shape.per_token;
  const bool alone = tokens <= FEW;
  bf16* memory = alone ? space.normed.need(Left::size(hidden, tokens)) : model.normed.data;
  const Left out(memory, hidden, tokens);
  int32_t* chosen = alone ? space.chosen.need(pairs) : model.chosen.data;
  float* shares = alone ? space.shares.need(pairs) : model.shares.data;
  float* x = space.routed.need(size_t(hidden) + shape.experts);
  const auto send = [&](int t) {
    rms_norm(residual(t), layer.norm2.data(), hidden, shape.eps, Plain<float>{x});
    const Left::Row row = out.row(t);
    for (int c = 0; c < hidden; c += KB) floats_to_bf16(x + c, row.at(c), std::min(KB, hidden - c));
    row.zero_from(hidden);
    choose_experts(shape, layer.router.data(), x, x + hidden, chosen + t * shape.per_token,
                   shares + t * shape.per_token);
  };
  if (alone) {
    for (int t = 0; t < tokens; ++t) send(t);
  } else {
    each_token(send);
    meet(NORM);
  }
  group_pairs(shape, layer, chosen, tokens, space.pairs);
  return {out, chosen, shares};
}

// Items [from, to) of what gate and up of an expert come to.
inline void Forward::expert_up(const Layer& layer, const Routed& routed, int one, int from, int to) {
  const Pairs& pairs = space.pairs;
  const Matrix& w = layer.experts[pairs.experts[one]].gate_up;
  const int count = pairs.count(one), inter = shape.expert_inter;
  Left left = routed.rows;
  if (tokens > 1) {
    left = Left(space.gathered.need(Left::size(hidden, count)), hidden, count);
    if (gathered != one)
      for (int i = 0; i < count; ++i) {
        const Left::Row row = routed.rows.row(pairs.order[pairs.begin[one] + i] / shape.per_token), mine = left.row(i);
        for (int c = 0; c < hidden; c += KB) memcpy(mine.at(c), row.at(c), KB * sizeof(bf16));
      }
    gathered = one;
  }
  const Left out(model.expert_act.data + pairs.rows[one] * round_up(inter, KB), inter, count);
  product(Shared::only(from, to), Division(w, count, 1), left, count, w, space.product,
          [&](int r, int rows, int nb, const float* sums) {
            const int columns = std::min(16, inter - nb * 16);
            for (int i = 0; i < rows; ++i) {
              const Left::Row row = out.row(r + i);
              gate(sums + i * NB, nullptr, columns, row.at(nb * 16));
              if (nb + 1 == w.blocks()) row.zero_from(inter);
            }
          });
}

// Blocks [from, to) of the hidden size.
inline void Forward::expert_down(const Layer& layer, const Routed& routed, int one, int from, int to) {
  const Pairs& pairs = space.pairs;
  const Matrix& w = layer.experts[pairs.experts[one]].down;
  const int count = pairs.count(one), inter = shape.expert_inter;
  const Left left(model.expert_act.data + pairs.rows[one] * round_up(inter, KB), inter, count);
  product(Shared::only(from, to), Division::whole(w, count), left, count, w, space.product,
          [&](int r, int rows, int nb, const float* sums) {
            const int columns = std::min(NB, hidden - nb * NB);
            for (int i = 0; i < rows; ++i) {
              const int pair = pairs.order[pairs.begin[one] + r + i];
              const float share = routed.shares[pair];
              float* out = residual(pair / shape.per_token) + nb * NB;
              for (int j = 0; j < columns; ++j) out[j] += share * sums[i * NB + j];
            }
          });
}

inline void Forward::mix_experts(const Layer& layer) {
  const Routed routed = route(layer);
  const Pairs& pairs = space.pairs;
  const int active = int(pairs.experts.size());
  gathered = -1;
  const auto shared = [&](int items) {
    const int part = (items + threads - 1) / threads;
    return Shared::parts(model.taken(counter++), items, part, part * 3 / 4, part / 24, threads, id);
  };
  int from, to;
  for (Shared work = shared(pairs.item[active]); work.take(from, to);)
    for (int one; from < to; from = std::min(to, pairs.item[one + 1])) {
      one = int(std::upper_bound(pairs.item.begin(), pairs.item.end(), from) - pairs.item.begin()) - 1;
      expert_up(layer, routed, one, from - pairs.item[one], std::min(to, pairs.item[one + 1]) - pairs.item[one]);
    }
  meet(GATE_UP);
  for (Shared work = shared((hidden + NB - 1) / NB); work.take(from, to);)
    for (int one = 0; one < active; ++one) expert_down(layer, routed, one, from, to);
  meet(DOWN);
}

}  // namespace
