// What a row is sampled with.
#pragma once

#include <algorithm>
#include <cstdint>

extern "C" {

// Columns as in SamplingBatch, one entry per row. `mask` has `mask_words` words of bits for each of the rows
// `mask_rows`; null where every row may get any token.
struct PbSampling {
  const float *temperatures, *top_ps, *min_ps;
  const int64_t *top_ks, *seeds, *steps;
  const int32_t* mask;
  const int64_t* mask_rows;
  int64_t mask_words;
  int32_t masks;
};

}  // extern "C"

namespace {

enum Failure : int64_t { NO_FINITE = -1, HOLDS_NAN = -2 };

struct RowParams {
  float temperature, top_p, min_p;
  int64_t top_k, seed, step;
  bool greedy() const { return !(temperature > 0) || top_k == 1; }
};

inline RowParams row_params(const PbSampling& s, int row) {
  return {s.temperatures[row], s.top_ps[row], s.min_ps[row], s.top_ks[row], s.seeds[row], s.steps[row]};
}

// The mask of a row, or null.
inline const int32_t* mask_of(const PbSampling& s, int row) {
  if (!s.mask) return nullptr;
  const int64_t* at = std::find(s.mask_rows, s.mask_rows + s.masks, int64_t(row));
  return at != s.mask_rows + s.masks ? s.mask + (at - s.mask_rows) * s.mask_words : nullptr;
}

}  // namespace
