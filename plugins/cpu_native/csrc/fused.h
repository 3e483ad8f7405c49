// Sampling within a forward pass: of a greedy row only the largest logit is kept while logits are computed, and the
// others' go to memory of the pass, where the same threads sample them.
#pragma once

#include <cmath>
#include <cstdint>

#include "model.h"
#include "sampling.h"

namespace {

// Before the pass: where each sampled row's logits go; null where only the largest one counts.
inline void place_logits(Model& model, const PbBatch& batch) {
  model.logits_to.assign(batch.sampled, nullptr);
  if (batch.logits) {
    for (int i = 0; i < batch.sampled; ++i) model.logits_to[i] = batch.logits + size_t(i) * model.shape.vocab;
    return;
  }
  if (!batch.drawn || !batch.sampling) return;
  std::vector<int> rows;
  for (int i = 0; i < batch.sampled; ++i)
    if (!row_params(*batch.sampling, i).greedy() || mask_of(*batch.sampling, i)) rows.push_back(i);
  const size_t stride = size_t(round_up(model.shape.vocab, 16));
  float* own = rows.empty() ? nullptr : model.own_logits.need(rows.size() * stride);
  for (size_t i = 0; i < rows.size(); ++i) model.logits_to[rows[i]] = own + i * stride;
  if (own)
    for (auto& space : model.space) space.sample.need(model.shape.vocab);
}

// Of 32 numbers, the first `columns` of which are logits of the ids from `first`. Blocks come in any order: of equal
// ones the smallest id wins.
inline void note_largest(const float* row, int columns, int first, Best& found) {
  const Lanes a = first_at(row, columns, -INFINITY), b = first_at(row + 16, columns - 16, -INFINITY);
  if (unordered(a, b)) {
    found = {NAN, 0};
    return;
  }
  const float top = largest(larger(a, b));
  if (!(top >= found.value)) return;
  int at = 0;
  while (row[at] != top) ++at;
  if (top > found.value || first + at < found.id) found = {top, first + at};
}

// Of all threads, or a Failure.
inline int64_t largest_of_row(const Model& model, int row) {
  Best found{-INFINITY, INT32_MAX};
  for (const auto& space : model.space) {
    const Best& other = space.best.data[row];
    if (std::isnan(other.value)) return HOLDS_NAN;
    if (other.value > found.value || (other.value == found.value && other.id < found.id)) found = other;
  }
  return found.value < -FLT_MAX ? int64_t(NO_FINITE) : found.id;
}

inline void logits_indices(Model& model, const PbBatch& batch, Shared work, SampleSpace& space) {
  int from, to;
  while (work.take(from, to))
    for (int i = from; i < to; ++i)
      batch.drawn[i] = model.logits_to[i]
                           ? sample_row(model.logits_to[i], model.shape.vocab, row_params(*batch.sampling, i),
                                        mask_of(*batch.sampling, i), space)
                           : largest_of_row(model, i);
}

}  // namespace
