// From one row of logits to one token: temperature, top_k, top_p, min_p, in this order, each on what the one before it
// left. The vocabulary is never sorted.
//
// Tokens stand in one order: larger logit first, smaller id among equals. Each filter keeps a head of it, so what is
// left is a head too. Short heads are collected by a threshold (a row's 64 largest tokens are at least as large as the
// 64th largest maximum of its chunks) and sorted; of long ones the end is found by descending through the digits of the
// logits, mass by digit. Of the head, the token with the largest logit / temperature + noise is drawn: Gumbel noise, a
// function of seed, step and token id (noise.h). So a draw is a function of what the filters keep, whichever way that
// was found, and little changes in logits seldom change it. It is the same as in plugins/sampler_torch, but for what
// rounding does at the border of a filter.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "draw.h"
#include "lanes.h"
#include "logit_row.h"
#include "sample_params.h"

namespace {

// Tokens that `mask` has no bit for become impossible; where none of the others is possible, all of these become
// equally likely. As toolkit.token_mask does it.
inline void apply_mask(float* x, int vocab, const int32_t* mask) {
  const auto bits_at = [=](int i) { return uint32_t(mask[i / 32]) >> (i % 32) & 0xffffu; };
  const auto put = [=](Lanes allowed_or, bool own) {
    Lanes best = lanes_of(-INFINITY);
    uint32_t nan = 0;
    for (int i = 0; i < vocab; i += LANES) {
      const int left = vocab - i;
      const Lanes kept = own ? first_at(x + i, left, -INFINITY) : allowed_or;
      const Lanes a = chosen(bits_at(i), kept, lanes_of(-INFINITY));
      nan |= unordered(a, a);
      best = larger(best, a);
      if (left >= LANES) {
        store(x + i, a);
      } else {
        alignas(64) float part[LANES];
        store(part, a);
        memcpy(x + i, part, sizeof(float) * left);
      }
    }
    return nan || largest(best) != -INFINITY;
  };
  if (!put(lanes_of(0.0f), true)) put(lanes_of(0.0f), false);
}

// The token of logits x[vocab], which may be changed, or a Failure. `space.need(vocab)` came before.
inline int64_t sample_row(float* x, int vocab, const RowParams& p, const int32_t* mask, SampleSpace& space) {
  if (mask) apply_mask(x, vocab, mask);
  SampledRow row{x, vocab, space};
  if (row.survey()) return HOLDS_NAN;
  if (row.peak > FLT_MAX) {
    if (!row.clamp()) return NO_FINITE;
    row.survey();
  }
  if (row.peak < -FLT_MAX) return NO_FINITE;
  return p.greedy() ? row.first_peak() : row.draw(p);
}

}  // namespace
