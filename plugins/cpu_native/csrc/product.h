// Products of rows with packed weights.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <immintrin.h>

#include "blocks.h"
#include "few_rows.h"
#include "left.h"
#include "matrix.h"
#include "memory.h"
#include "team.h"

namespace {

// Weights that will be read next begin to move while others are still at work.
inline void warm(const Matrix& w, int nb) {
  if (nb >= w.blocks()) return;
  const char* p = reinterpret_cast<const char*>(w.block(nb));
  for (size_t i = 0; i < std::min(w.block_bytes(), size_t(8192)); i += 64) _mm_prefetch(p + i, _MM_HINT_T1);
}

// What a thread needs besides: sums and unpacked blocks.
struct ProductSpace {
  Buffer<float> sums;
  Buffer<bf16> tiles, turned;
};

// How a product is divided: into items, a block of weights for a group of rows each, group by group. All threads work
// on all rows, each with its part of the weights, where these rows stay in a core's cache. Where they do not, each has
// rows of its own, and all of the weights: what one core has written another one is slow to get.
struct Division {
  int together, groups, blocks, part;  // rows of a group; items of a thread

  Division(const Matrix& w, int m, int threads) : blocks(w.blocks()) {
    const int most = std::max(MB, int(CACHED / (size_t(w.k_pad) * 2)) / MB * MB);
    const int own = m <= most ? m : rows_of_one(m, threads), apart = m <= most ? 1 : threads,
              each = (own + most - 1) / most;
    together = round_up((own + each - 1) / each, MB);
    groups = apart * each;
    part = (items() + threads - 1) / threads;
  }
  // All rows as one group.
  static Division whole(const Matrix& w, int m) {
    Division made(w, 1, 1);
    made.together = round_up(m, MB);
    return made;
  }
  int items() const { return groups * blocks; }

  // Rows of a thread, where each has its own.
  static int rows_of_one(int m, int threads) { return round_up((m + threads - 1) / threads, MB); }

 private:
  static constexpr size_t CACHED = size_t(1) << 20;  // half of the second level
};

// Steps of unpacked weights that stay in the first level's cache while rows pass by.
constexpr int MOST_STEPS = 20;

// More than 32 rows. A part of a block of weights, as much as the first level's cache holds, is unpacked with the first
// 32 rows; then the others pass by. While tiles work on a block of sums, the one before is given away, row by row, and
// memory is asked for the next block of weights.
template <Format F, class Done>
void wide_product(Shared& work, const Division& division, const Left& a, int m, const Matrix& w, ProductSpace& space,
                  Done&& done) {
  const int steps = w.steps(), parts = (steps + MOST_STEPS - 1) / MOST_STEPS, some = (steps + parts - 1) / parts;
  const int rows_per_step = (MB + some - 1) / some, most_blocks = (division.together + MB - 1) / MB;
  // One more than are worked on: the last ones of a block of weights are given away while the next is worked on.
  const int places = parts == 1 ? 2 : most_blocks + 1;
  float* c = space.sums.need(size_t(places) * MB * NB);
  bf16* scratch = F == BF16 ? nullptr : space.tiles.need(size_t(some) * STEP);
  struct {
    int row = 0, rows = 0, nb = 0, given = 0;
    float* sums = nullptr;
  } ready;
  const auto give = [&](int most) {
    const int n = std::min(most, ready.rows - ready.given);
    if (n <= 0) return;
    done(ready.row + ready.given, n, ready.nb, ready.sums + ready.given * NB);
    ready.given += n;
  };
  OneByOne items{work};
  int begin = 0;  // where the sums of the first rows are
  for (int item = items.next(), later; item >= 0; item = later) {
    const int nb = item % division.blocks, first = item / division.blocks * division.together;
    const int last = std::min(m, first + division.together);
    const int blocks = std::max(0, last - first + MB - 1) / MB;
    later = items.next();
    const char* ahead = reinterpret_cast<const char*>(later >= 0 ? w.block(later % division.blocks) : nullptr);
    const size_t slice = ahead ? w.block_bytes() / 64 / (size_t(std::max(1, blocks)) * steps) + 1 : 0;
    Cursor<F> from(w, nb);
    for (int s = 0; s < steps; s += some) {
      const int count = std::min(some, steps - s);
      for (int i = 0; i < blocks; ++i) {
        const int r = first + i * MB, rows = std::min(MB, last - r);
        float* sums = c + size_t((begin + i) % places) * MB * NB;
        const bf16* left = a.rows(r) + size_t(s) * a.height * KB;
        const auto meanwhile = [&] {
          give(rows_per_step);
          for (size_t line = 0; line < slice; ++line, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
        };
        if constexpr (F == BF16)
          tile_block(left, a.height, rows, reinterpret_cast<const bf16*>(w.block(nb)) + s * STEP, count, sums, s > 0,
                     meanwhile);
        else if (i == 0)
          packed_block<F, true>(left, a.height, rows, from, count, scratch, sums, s > 0, meanwhile);
        else
          tile_block(left, a.height, rows, scratch, count, sums, s > 0, meanwhile);
        give(MB);
        if (s + some >= steps) ready = {r, rows, nb, 0, sums};
      }
    }
    begin = (begin + blocks) % places;
  }
  give(MB);
}

// Every block of a[m, k] * w^T goes to `done(row, rows, block of 32 columns, sums)`, at most 32 rows at a time. It may
// change the sums.
template <class Done>
void product(Shared work, const Division& division, const Left& a, int m, const Matrix& w, ProductSpace& space,
             Done&& done) {
  by_format(w, [&](auto format) {
    constexpr Format F = decltype(format)::value;
    if (m > MB) return wide_product<F>(work, division, a, m, w, space, done);
    float* c = space.sums.need(MB * NB);
    bf16* scratch = space.tiles.need(size_t(w.steps()) * STEP);
    const bf16* turned = right_side<F>(a, m, w.steps(), space.turned);
    OneByOne items{work};
    for (int nb; (nb = items.next()) >= 0;) {
      block<F>(a, turned, m, w, nb, scratch, c);
      done(0, m, nb, c);
    }
  });
}

}  // namespace
