// What adapters add to a product (LoRA): x * a^T * b^T, for the tokens of each adapter.
//
// The small products x * a^T are shared among threads: a piece of work is a few tokens of one adapter and 16 rows of
// its `a`. There is no barrier after them. A thread that finds none left goes on with the large product, and waits for
// the small ones when its first block of sums is ready. What an adapter adds to a block is computed while its sums are
// in the first level's cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "lanes.h"
#include "left.h"
#include "memory.h"
#include "model.h"
#include "sums.h"

namespace {

class AddedBySite {
 public:
  // `x` is the left side of the product at `site`; the small products go to `small` float [tokens, most_ranks].
  AddedBySite(const PbAdditions* all, int site, const Left& x, float* small)
      : all(all), site(site), x(x), small(small) {
    for (int i = 0; all && i < all->count; ++i) pieces += pieces_of(i);
  }

  int pieces = 0;  // of work; 0: nothing is added here

  // Computes one piece. `space` holds rows that are not next to each other in `x`.
  void shrink(int piece, Buffer<bf16>& space) const {
    int which = 0;
    for (int n; piece >= (n = pieces_of(which)); ++which) piece -= n;
    const int strip = piece % strips(which), begin = all->begin[which] + piece / strips(which) * TOGETHER;
    const int count = std::min(TOGETHER, all->begin[which + 1] - begin);
    const int32_t* tokens = all->order + begin;
    alignas(64) float sums[TOGETHER * STRIP];
    rows_times_strip(count, rows_of(tokens, count, space), part(which).a + size_t(strip) * x.steps * STRIP * KB,
                     x.steps, sums);
    for (int i = 0; i < count; ++i)
      memcpy(small_of(tokens[i]) + strip * STRIP, sums + i * STRIP, STRIP * sizeof(float));
  }

  // Adds to block `nb` of the product, `sums` [rows][NB] of the tokens from `first` on.
  void expand(int first, int rows, int nb, float* sums) const {
    for (int i = 0; i < rows; ++i) {
      const int which = all->which[first + i], at = all->place[first + i];
      if (which < 0 || !part(which).ranks) continue;
      // An adapter's first token here takes along its others.
      if (at > all->begin[which] && all->order[at - 1] >= first) continue;
      const int32_t *tokens = all->order + at, *end = all->order + all->begin[which + 1];
      while (const int count = count_before(tokens, end, first + rows)) {
        expand_some(count, part(which), nb, tokens, first, sums);
        tokens += count;
      }
    }
  }

 private:
  static constexpr int TOGETHER = 8;  // tokens of one adapter, at most

  // How many of the tokens from `tokens` on come before `limit`, at most TOGETHER.
  static int count_before(const int32_t* tokens, const int32_t* end, int limit) {
    int count = 0;
    while (count < TOGETHER && tokens + count < end && tokens[count] < limit) ++count;
    return count;
  }

  void expand_some(int count, const PbLowRank& one, int nb, const int32_t* tokens, int first, float* sums) const {
    switch (count) {
      case 1: return expand_block<1>(one, nb, tokens, first, sums);
      case 2: return expand_block<2>(one, nb, tokens, first, sums);
      case 3: return expand_block<3>(one, nb, tokens, first, sums);
      case 4: return expand_block<4>(one, nb, tokens, first, sums);
      case 5: return expand_block<5>(one, nb, tokens, first, sums);
      case 6: return expand_block<6>(one, nb, tokens, first, sums);
      case 7: return expand_block<7>(one, nb, tokens, first, sums);
      default: return expand_block<8>(one, nb, tokens, first, sums);
    }
  }

  // For N tokens of one adapter, whose numbers are read and converted once for all of them. Each token's sums are made
  // in the order of ranks, whatever other tokens there are.
  template <int N>
  void expand_block(const PbLowRank& one, int nb, const int32_t* tokens, int first, float* all_sums) const {
    for (int half = 0; half < NB / LANES; ++half) {
      const int32_t* entry = one.halves + (nb * (NB / LANES) + half) * 3;
      const bf16* b = one.b + size_t(entry[2]) * LANES;
      Lanes sums[N];
      const float* factors[N];
      float* to[N];
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) {
        to[i] = all_sums + (tokens[i] - first) * NB + half * LANES;
        factors[i] = small_of(tokens[i]) + entry[0];
        sums[i] = lanes_at(to[i]);
      }
      for (int r = 0, ranks = entry[1]; r < ranks; ++r) {
        const Lanes right = lanes_of_bf16(b + r * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) sums[i] = fused(lanes_of(factors[i][r]), right, sums[i]);
      }
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) store(to[i], sums[i]);
    }
  }

  const PbLowRank& part(int which) const { return all->adapters[which][site]; }
  int strips(int which) const { return part(which).ranks / STRIP; }
  int pieces_of(int which) const {
    return strips(which) * ((all->begin[which + 1] - all->begin[which] + TOGETHER - 1) / TOGETHER);
  }
  float* small_of(int token) const { return small + size_t(token) * all->most_ranks; }

  Rows rows_of(const int32_t* tokens, int count, Buffer<bf16>& space) const {
    const int first = tokens[0], last = tokens[count - 1];
    const Left::Row row = x.row(first);
    if (last - first == count - 1 && last / MB == first / MB) return {row.data, KB, row.step};
    bf16* to = space.need(size_t(TOGETHER) * x.steps * KB);
    for (int i = 0; i < count; ++i) {
      const Left::Row from = x.row(tokens[i]);
      for (int s = 0; s < x.steps; ++s) memcpy(to + (size_t(s) * count + i) * KB, from.at(s * KB), KB * sizeof(bf16));
    }
    return {to, KB, size_t(count) * KB};
  }

  const PbAdditions* all;
  const int site;
  const Left& x;
  float* small;
};

}  // namespace

extern "C" {

// What adapters add at a site, for tests: to out float [tokens, blocks * 32], whose columns are the packed matrix's
// rows, for x bf16 [tokens, k]. 0, or 1 where memory does not suffice.
int pb_add(const PbAdditions* additions, int site, const bf16* x, int tokens, int k, int blocks, float* out) {
  try {
    Buffer<bf16> numbers, gathered;
    Buffer<float> small;
    const Left left(numbers.need(Left::size(k, tokens)), k, tokens);
    for (int i = 0; i < tokens; ++i)
      for (int c = 0; c < k; c += KB)
        memcpy(left.row(i).at(c), x + size_t(i) * k + c, sizeof(bf16) * std::min(KB, k - c));
    const AddedBySite added(additions, site, left, small.need(size_t(tokens) * additions->most_ranks));
    for (int i = 0; i < added.pieces; ++i) added.shrink(i, gathered);
    alignas(64) float sums[MB * NB];
    for (int first = 0; first < tokens; first += MB)
      for (int nb = 0; nb < blocks; ++nb) {
        const int rows = std::min(MB, tokens - first);
        std::fill(sums, sums + rows * NB, 0.0f);
        added.expand(first, rows, nb, sums);
        for (int i = 0; i < rows; ++i)
          memcpy(out + (size_t(first + i) * blocks + nb) * NB, sums + i * NB, NB * sizeof(float));
      }
    return 0;
  } catch (...) {
    return 1;
  }
}

}  // extern "C"
