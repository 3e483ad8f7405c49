// Which experts a token goes to, and the pairs of tokens and experts in the order of experts.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "lanes.h"
#include "left.h"
#include "model.h"
#include "product.h"

namespace {

// The router's answers, [tokens, per_token] each, and the tokens' normed rows.
struct Routed {
  Left rows;
  const int32_t* chosen;
  const float* shares;
};

inline float dot(const float* a, const float* b, int n) {
  Lanes sums[4] = {lanes_of(0), lanes_of(0), lanes_of(0), lanes_of(0)};
  int i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES)
    for (int j = 0; j < 4; ++j) sums[j] = fused(lanes_at(a + i + j * LANES), lanes_at(b + i + j * LANES), sums[j]);
  for (; i < n; i += LANES) sums[0] = fused(first_at(a + i, n - i, 0), first_at(b + i, n - i, 0), sums[0]);
  return total((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// The largest shares of a softmax over all experts, and their numbers: of equal ones the first. `x` is the token's
// normed row, `scores` memory for a number per expert.
inline void choose_experts(const PbShape& shape, const float* router, const float* x, float* scores, int32_t* chosen,
                           float* shares) {
  float most = -INFINITY, sum = 0, kept = 0;
  for (int e = 0; e < shape.experts; ++e) {
    scores[e] = dot(x, router + size_t(e) * shape.hidden, shape.hidden);
    most = std::max(most, scores[e]);
  }
  for (int e = 0; e < shape.experts; ++e) sum += scores[e] = std::exp(scores[e] - most);
  for (int j = 0; j < shape.per_token; ++j) {
    int best = -1;
    for (int e = 0; e < shape.experts; ++e) {
      const bool taken = std::find(chosen, chosen + j, e) != chosen + j;
      // Numbers that are none are never larger, and the first expert is taken.
      if (!taken && (best < 0 || scores[e] > scores[best])) best = e;
    }
    chosen[j] = best;
    shares[j] = scores[best] / sum;
    kept += shares[j];
  }
  if (shape.normalised)
    for (int j = 0; j < shape.per_token; ++j) shares[j] /= kept;
}

// Rows in memory of an expert's `count` pairs, as a Left has them.
inline size_t rows_of(int count) { return size_t(count <= MB ? count : round_up(count, MB)); }

// The most rows that all experts together may have.
inline size_t most_rows(const PbShape& shape, int tokens) {
  const size_t pairs = size_t(tokens) * shape.per_token;
  return pairs + std::min<size_t>(shape.experts, pairs / MB) * (MB - 1);
}

// Sorts pairs by expert. An expert's items are those of its product with gate and up.
inline void group_pairs(const PbShape& shape, const Layer& layer, const int32_t* chosen, int tokens, Pairs& found) {
  const int pairs = tokens * shape.per_token;
  std::vector<int>& order = found.order;
  order.resize(pairs);
  for (int i = 0; i < pairs; ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return chosen[a] < chosen[b]; });
  found.experts.clear();
  found.begin.clear();
  for (int i = 0; i < pairs; ++i)
    if (!i || chosen[order[i]] != found.experts.back()) {
      found.experts.push_back(chosen[order[i]]);
      found.begin.push_back(i);
    }
  found.begin.push_back(pairs);
  found.rows.assign(1, 0);
  found.item.assign(1, 0);
  for (size_t one = 0; one < found.experts.size(); ++one) {
    const int count = found.count(int(one));
    found.rows.push_back(found.rows.back() + rows_of(count));
    found.item.push_back(found.item.back() + Division(layer.experts[found.experts[one]].gate_up, count, 1).items());
  }
}

}  // namespace
