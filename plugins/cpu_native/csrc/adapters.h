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
  AddedBySite(const PbAdditions* all, int site, const Left& x, int tokens, float* small)
      : all(all), site(site), x(x), together(tokens <= MB ? 4 : MOST_TOGETHER), small(small) {
    for (int i = 0; all && i < all->count; ++i) pieces += pieces_of(i);
  }

  int pieces = 0;  // of work; 0: nothing is added here

  // Computes one piece. `space` holds rows that are not next to each other in `x`.
  void shrink(int piece, Buffer<bf16>& space) const {
    int which = 0;
    for (int n; piece >= (n = pieces_of(which)); ++which) piece -= n;
    const int strip = piece % strips(which), begin = all->begin[which] + piece / strips(which) * together;
    const int count = std::min(together, all->begin[which + 1] - begin);
    const int32_t* tokens = all->order + begin;
    alignas(64) float sums[MOST_TOGETHER * STRIP];
    rows_times_strip(count, rows_of(tokens, count, space), part(which).a + size_t(strip) * x.steps * STRIP * KB,
                     x.steps, sums);
    for (int i = 0; i < count; ++i)
      memcpy(small_of(tokens[i]) + strip * STRIP, sums + i * STRIP, STRIP * sizeof(float));
  }

  // Adds to block `nb` of the product, `sums` [rows][NB] of the tokens from `first` on.
  void expand(int first, int rows, int nb, float* sums) const {
    for (int i = 0; i < rows; ++i, sums += NB) {
      const int which = all->which[first + i];
      if (which < 0 || !part(which).ranks) continue;
      for (int half = 0; half < NB / LANES; ++half)
        expand_half(part(which), nb * (NB / LANES) + half, small_of(first + i), sums + half * LANES);
    }
  }

 private:
  static constexpr int MOST_TOGETHER = 8;

  static void expand_half(const PbLowRank& one, int half, const float* small, float* sums) {
    const int32_t first = one.halves[half * 3], count = one.halves[half * 3 + 1];
    const bf16* b = one.b + size_t(one.halves[half * 3 + 2]) * LANES;
    Lanes sum = lanes_at(sums);
    for (int r = 0; r < count; ++r) sum = fused(lanes_of(small[first + r]), lanes_of_bf16(b + r * LANES), sum);
    store(sums, sum);
  }

  const PbLowRank& part(int which) const { return all->adapters[which][site]; }
  int strips(int which) const { return part(which).ranks / STRIP; }
  int pieces_of(int which) const {
    return strips(which) * ((all->begin[which + 1] - all->begin[which] + together - 1) / together);
  }
  float* small_of(int token) const { return small + size_t(token) * all->most_ranks; }

  Rows rows_of(const int32_t* tokens, int count, Buffer<bf16>& space) const {
    const int first = tokens[0], last = tokens[count - 1];
    const Left::Row row = x.row(first);
    if (last - first == count - 1 && last / MB == first / MB) return {row.data, KB, row.step};
    bf16* to = space.need(size_t(MOST_TOGETHER) * x.steps * KB);
    for (int i = 0; i < count; ++i) {
      const Left::Row from = x.row(tokens[i]);
      for (int s = 0; s < x.steps; ++s) memcpy(to + (size_t(s) * count + i) * KB, from.at(s * KB), KB * sizeof(bf16));
    }
    return {to, KB, size_t(count) * KB};
  }

  const PbAdditions* all;
  const int site;
  const Left& x;
  const int together;  // tokens of a piece
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
    const AddedBySite added(additions, site, left, tokens, small.need(size_t(tokens) * additions->most_ranks));
    for (int i = 0; i < added.pieces; ++i) added.shrink(i, gathered);
    for (int i = 0; i < tokens; ++i)
      for (int nb = 0; nb < blocks; ++nb) added.expand(i, 1, nb, out + (size_t(i) * blocks + nb) * NB);
    return 0;
  } catch (...) {
    return 1;
  }
}

}  // extern "C"
