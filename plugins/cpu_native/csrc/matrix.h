// Weights, packed: see formats.h.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "formats.h"
#include "grid.h"
#include "memory.h"
#include "numbers.h"
#include "team.h"

namespace {

// A row of codes, as a quantised checkpoint has them: bytes, or two to a byte, the first in the low bits; and a word
// for every `group` columns. Of NIBBLES a word is a float16 scale and, above it, a float16 least number; of BYTES it is
// a float16 scale.
struct CodedRow {
  const uint8_t* codes = nullptr;
  const uint32_t* words = nullptr;
  int group = 1;
};

struct Matrix {
  struct Rest {
    int32_t column;
    int16_t row;  // in its block
    bf16 value;
  };

  int n = 0, k = 0, n_pad = 0, k_pad = 0;
  Format format = BF16;
  int alike = 1;                       // steps from a multiple of it on whose scales are the same in each row
  uint8_t* data = nullptr;             // in the model's arena
  alignas(64) uint8_t upper[16] = {};  // BF12: the upper byte for each code
  uint8_t code_of[128] = {};           // the code for each upper byte without its sign; 8 where there is none
  std::vector<int32_t> rest_from;      // where each block's numbers begin in `rest`
  std::vector<Rest> rest;              // what does not fit, in the order of steps

  int steps() const { return k_pad / KB; }
  int blocks() const { return n_pad / NB; }
  size_t block_bytes() const { return steps() * step_bytes(format); }
  const uint8_t* block(int nb) const { return data + nb * block_bytes(); }
  const uint8_t* strip(int nb, int half) const { return block(nb) + half * (block_bytes() / 2); }

  // `row(j)` points to k numbers, or is null, which stands for zeros. May throw std::bad_alloc.
  template <class Row>
  void pack(Team& team, Arena& arena, int n_, int k_, Wanted wanted, Row&& row) {
    n = n_, k = k_, n_pad = round_up(n, NB), k_pad = round_up(k, KB);
    if (ALL_FORMATS && (wanted == EXACT || wanted == EIGHT))
      for (Format one : {NIBBLES, BYTES})
        if (on_grid(one, row, 64) && try_pack(team, arena, one, true, row)) return;
    if (ALL_FORMATS && (wanted == EXACT || wanted == TWELVE) && choose_upper(team, row) &&
        try_pack(team, arena, BF12, true, row))
      return;
    if (wanted == EIGHT && try_pack(team, arena, BYTES, false, row)) return;
    try_pack(team, arena, BF16, true, row);
  }

  // The same of codes, which stay as they are: `row(j)` is a CodedRow, that without codes stands for zeros. `group` is
  // that of all rows, or 0.
  template <class Row>
  void take(Team& team, Arena& arena, int n_, int k_, Format f, int group, Row&& row) {
    alike = std::max(1, group / KB);
    n = n_, k = k_, n_pad = round_up(n, NB), k_pad = round_up(k, KB), format = f;
    data = arena.take(block_bytes() * blocks());
    std::atomic<int> next{0};
    team.run([&](int) {
      for (int nb; (nb = next.fetch_add(1)) < blocks();) take_strips(row, nb);
    });
    rest_from.assign(blocks() + 1, 0);
    rest.clear();
  }

  // What is kept apart of a step, into its unpacked numbers. `at` goes through the block's rest, step by step.
  void put_rest(int nb, int step, int& at, bf16* to) const {
    for (; at < rest_from[nb + 1] && rest[at].column < (step + 1) * KB; ++at)
      to[place(rest[at].row, rest[at].column % KB)] = rest[at].value;
  }

 private:
  // False, and nothing is taken, where too many numbers do not fit.
  template <class Row>
  bool try_pack(Team& team, Arena& arena, Format f, bool exactly, Row&& row) {
    format = f;
    const Arena::Mark before = arena.mark();
    data = arena.take(block_bytes() * blocks());
    std::vector<std::vector<Rest>> found(blocks());
    std::atomic<int> next{0};
    team.run([&](int) {
      for (int nb; (nb = next.fetch_add(1)) < blocks();) {
        if (in_strips(f)) {
          pack_strips(row, nb, exactly, found[nb]);
          continue;
        }
        for (int s = 0; s < steps(); ++s) pack_step(row, nb, s, found[nb]);
      }
    });
    rest_from.assign(1, 0);
    rest.clear();
    for (auto& one : found) {
      rest.insert(rest.end(), one.begin(), one.end());
      rest_from.push_back(int32_t(rest.size()));
    }
    if (f == BF16 || rest.size() <= MOST_APART * n * k) return true;
    arena.back_to(before);
    return false;
  }

  static constexpr double MOST_APART = 1.0 / 256;

  // The seven upper bytes that most numbers have, besides that of zero. False where too many numbers have another one.
  template <class Row>
  bool choose_upper(Team& team, Row&& row) {
    std::vector<std::vector<int64_t>> counts(team.size(), std::vector<int64_t>(128));
    std::atomic<int> next{0};
    team.run([&](int id) {
      for (int j; (j = next.fetch_add(1)) < n;)
        if (const bf16* from = row(j))
          for (int i = 0; i < k; ++i) ++counts[id][(from[i] >> 8) & 0x7f];
    });
    std::vector<std::pair<int64_t, int>> most;
    int64_t left = 0;
    for (int u = 1; u < 128; ++u) {
      int64_t count = 0;
      for (auto& one : counts) count += one[u];
      most.push_back({-count, u});
      left += count;
    }
    std::sort(most.begin(), most.end());
    memset(upper, 0, sizeof upper);
    for (int code = 1; code < 8; ++code) {
      upper[code] = uint8_t(most[code - 1].second);
      left += most[code - 1].first;
    }
    memset(code_of, 8, sizeof code_of);
    for (int code = 0; code < 8; ++code) {
      upper[8 + code] = upper[code] | 0x80;
      code_of[upper[code]] = uint8_t(code);
    }
    return left <= MOST_APART * n * k;
  }

  template <class Row>
  void pack_step(Row&& row, int nb, int s, std::vector<Rest>& found) {
    alignas(64) bf16 plain[STEP] = {};
    for (int j = 0; j < NB; ++j) {
      const int at = nb * NB + j, columns = std::min(KB, k - s * KB);
      const bf16* from = at < n ? row(at) : nullptr;
      if (!from) continue;
      bf16* to = plain + j / 16 * 512 + j % 16 * 2;
      for (int i = 0; i < columns; ++i) to[i / 2 * 32 + (i & 1)] = from[s * KB + i];
    }
    uint8_t* to = data + nb * block_bytes() + s * step_bytes(format);
    if (format == BF16) {
      memcpy(to, plain, sizeof plain);
    } else {
      pack12(plain, to, s, found);
    }
  }

  // 128 numbers at a time, four rows of a tile: 64 lower bytes, 64 more, 64 pairs of codes. The order within is that in
  // which unpacking bytes of two registers gives rows of a tile.
  void pack12(const bf16* plain, uint8_t* to, int s, std::vector<Rest>& found) const {
    for (int g = 0; g < STEP / 128; ++g, to += 192) {
      memset(to + 128, 0, 64);
      for (int half = 0; half < 2; ++half)
        for (int b = 0; b < 64; ++b) {
          // Byte b: lane b / 16; its first eight bytes belong to one row of the tile, the others to the next.
          const int which = g * 128 + half * 64 + (b % 16 / 8) * 32 + (b / 16) * 8 + b % 8;
          bf16 x = plain[which];
          int code = code_of[(x >> 8) & 0x7f];
          if (code == 8) {
            const int in = which % 512, j = which / 512 * 16 + in % 32 / 2, i = in / 32 * 2 + in % 2;
            found.push_back({s * KB + i, int16_t(j), x});
            x = 0, code = 0;
          }
          to[half * 64 + b] = uint8_t(x);
          to[128 + b] |= uint8_t((code | (x >> 15) << 3) << (half * 4));
        }
    }
  }

  // 32 numbers of a row, zeros behind its end.
  template <class Row>
  void read_grid(Row&& row, int j, int s, bf16 (&x)[GRID]) const {
    const bf16* from = j < n ? row(j) : nullptr;
    const int columns = from ? std::min(KB, k - s * KB) : 0;
    if (columns) memcpy(x, from + s * KB, columns * sizeof(bf16));
    memset(x + columns, 0, (KB - columns) * sizeof(bf16));
  }

  static bool find_grid(Format f, bool exactly, const bf16* x, OnGrid& found) {
    if (exactly) return f == NIBBLES ? on_16(x, found) : on_255(x, found);
    return nearest_of_255(x, found);
  }

  // Of `tries` grids all over the matrix, are nearly all as they should be? Those of zeros do not count.
  template <class Row>
  bool on_grid(Format f, Row&& row, int tries) const {
    const int64_t all = int64_t(n) * steps(), every = std::max<int64_t>(1, all / tries);
    int seen = 0, good = 0;
    for (int64_t i = every / 2; i < all; i += every) {
      bf16 x[GRID];
      OnGrid found;
      read_grid(row, int(i / steps()), int(i % steps()), x);
      if (std::all_of(x, x + GRID, [](bf16 one) { return one == 0; })) continue;
      ++seen;
      good += find_grid(f, true, x, found);
    }
    return good >= seen - seen / 16;
  }

  template <class Row>
  void pack_strips(Row&& row, int nb, bool exactly, std::vector<Rest>& found) {
    // Step by step, since that is the order of what is kept apart.
    for (int s = 0; s < steps(); ++s)
      for (int half = 0; half < 2; ++half) {
        uint8_t* to = data + nb * block_bytes() + half * (block_bytes() / 2) + s * strip_bytes(format);
        memset(to, 0, strip_bytes(format));
        float16* scales = reinterpret_cast<float16*>(to + code_bytes(format));
        for (int r = 0; r < STRIP; ++r) {
          bf16 x[GRID];
          OnGrid grid;
          read_grid(row, nb * NB + half * STRIP + r, s, x);
          if (!find_grid(format, exactly, x, grid)) {
            for (int i = 0; i < GRID; ++i)
              if (x[i]) found.push_back({s * KB + i, int16_t(half * STRIP + r), x[i]});
            continue;
          }
          scales[r] = grid.scale;
          if (format == NIBBLES) scales[STRIP + r] = grid.least;
          for (int i = 0; i < GRID; ++i) put_code(to, r, i, uint8_t(grid.code[i]));
        }
      }
  }

  // Of a strip's step, which was zero before.
  void put_code(uint8_t* to, int r, int i, uint8_t code) const {
    if (format == BYTES)
      to[r * KB + i] = code;
    else  // four rows together: each has its own nibble of 16 bits
      to[r / 4 * 64 + i * 2 + r % 4 / 2] |= uint8_t(code << (r % 2 * 4));
  }

  void put_word(uint8_t* to, int r, uint32_t word) const {
    uint8_t* words = to + code_bytes(format);
    if (format == INT4) {
      memcpy(words + r * 4, &word, 4);
      return;
    }
    memcpy(words + r * 2, &word, 2);
    const float16 least = float16(word >> 16);
    if (format == NIBBLES) memcpy(words + (STRIP + r) * 2, &least, 2);
  }

  template <class Row>
  void take_strips(Row&& row, int nb) {
    memset(data + nb * block_bytes(), 0, block_bytes());
    for (int j = 0; j < NB; ++j) {
      const CodedRow from = nb * NB + j < n ? row(nb * NB + j) : CodedRow{};
      if (!from.codes) continue;
      uint8_t* to = data + nb * block_bytes() + j / STRIP * (block_bytes() / 2);
      for (int s = 0; s < steps(); ++s, to += strip_bytes(format)) {
        put_word(to, j % STRIP, from.words[s * KB / from.group]);
        for (int c = s * KB; c < std::min(k, (s + 1) * KB); ++c)
          put_code(to, j % STRIP, c % KB,
                   format == BYTES ? from.codes[c] : uint8_t(from.codes[c / 2] >> (c % 2 * 4) & 15));
      }
    }
  }
};

}  // namespace
