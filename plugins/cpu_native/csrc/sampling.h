// From one row of logits to one token: temperature, top_k, top_p, min_p, in this order, each on what the one before it
// left. The vocabulary is never sorted.
//
// Tokens stand in one order: larger logit first, smaller id among equals. Each filter keeps a head of it, so what is left
// is a head too, and a draw is the first token of it where the cumulated mass exceeds a uniform number's share. Short
// heads are collected by a threshold (a row's 64 largest tokens are at least as large as the 64th largest maximum of its
// chunks) and sorted; in long ones the place is found by descending through the digits of the logits, mass by digit.
// Rows without top_k and top_p are drawn in the order of ids, and wide nuclei by rejection. Uniform numbers, and which
// way is taken, are those of plugins/sampler_torch, so that a seed gives the same tokens there and here, but for rounding.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "lanes.h"

extern "C" {

// Columns as in SamplingBatch, one entry per row. `mask` has `mask_words` words of bits for each of the rows `mask_rows`;
// null where every row may get any token.
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

// ---- random numbers ----------------------------------------------------------------------------------------------------

constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15u;

// splitmix64's finaliser.
inline uint64_t mixed(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// In [0, 1), by seed, step and trial alone.
inline double uniform(const RowParams& p, int trial = 0) {
  const uint64_t seed = uint64_t(p.seed) + uint64_t(trial) * 0x2545F4914F6CDD1Du;
  return double(mixed(mixed(seed + GAMMA) + (uint64_t(p.step) + 1) * GAMMA) >> 11) * 0x1p-53;
}

// ---- a row -------------------------------------------------------------------------------------------------------------

constexpr int CHUNK = 64;    // logits whose maximum is kept
constexpr int BLOCK = 256;   // logits whose mass is kept
constexpr int FEW = 32;      // tokens that most nuclei have at most
constexpr int WIDE = 256;    // a nucleus with more of them is drawn from by rejection
constexpr int TRIALS = 8;
constexpr int SHORT = 1024;  // a head that is sorted
constexpr int DIGITS = 2048;

// A token's place in the order, as a number: larger is nearer to the front.
using Place = uint64_t;

inline uint32_t ordered(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (bits == 0x80000000u) bits = 0;  // the two zeros are equal
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
inline Place place_of(float x, int id) { return Place(ordered(x)) << 32 | uint32_t(~uint32_t(id)); }
inline Place everyone() { return place_of(-FLT_MAX, INT32_MAX); }  // the end of the order
inline int id_of(Place p) { return int(~uint32_t(p)); }
inline float value_of(Place p) {
  const uint32_t key = uint32_t(p >> 32), bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// Memory for rows of a vocabulary; one per thread.
struct SampleSpace {
  std::vector<float> maxima, picked, masses;
  std::vector<double> cumulated, by_digit, mass;
  std::vector<Place> places;

  void need(int vocab) {
    if (int(places.size()) >= vocab) return;
    places.resize(vocab);
    masses.resize(vocab);
    maxima.resize((vocab + CHUNK - 1) / CHUNK);
    picked.resize((vocab + LANES - 1) / LANES);
    cumulated.resize((vocab + BLOCK - 1) / BLOCK);
    by_digit.resize(DIGITS * 2);
    mass.resize(std::min(vocab, SHORT));
  }
};

struct SampledRow {
  float* x;  // [vocab]
  int vocab;
  SampleSpace& space;
  float peak = 0;
  float factor = 0;    // log2(e) / temperature
  float temperature = 1;
  double sum = 0;      // of the mass of all tokens, 1 for the largest

  int chunks() const { return (vocab + CHUNK - 1) / CHUNK; }

  // Calls f(first id, lanes, how many of them are the row's) for ids from `from` to `to`; what is past the end is -inf.
  template <class F>
  void each(int from, int to, F&& f) const {
    int i = from;
    for (; i + LANES <= to; i += LANES) f(i, lanes_at(x + i), LANES);
    if (i < to) f(i, first_at(x + i, to - i, -INFINITY), to - i);
  }

  // Finds the largest logit and the maximum of each chunk. Says whether there is a NaN.
  bool survey() {
    uint32_t nan = 0;
    float* maxima = space.maxima.data();
    peak = -INFINITY;
    int i = 0, chunk = 0;
    for (; i + CHUNK <= vocab; i += CHUNK, ++chunk) {
      const Lanes a = lanes_at(x + i), b = lanes_at(x + i + 16), c = lanes_at(x + i + 32), d = lanes_at(x + i + 48);
      nan |= unordered(a, b) | unordered(c, d);
      maxima[chunk] = largest(larger(larger(a, b), larger(c, d)));
      peak = maxima[chunk] > peak ? maxima[chunk] : peak;
    }
    if (i < vocab) {
      float best = -INFINITY;
      for (; i < vocab; ++i) {
        nan |= x[i] != x[i];
        best = x[i] > best ? x[i] : best;
      }
      maxima[chunk] = best;
      peak = best > peak ? best : peak;
    }
    return nan != 0;
  }

  int first_peak() const {
    int i = 0;
    while (space.maxima[i] != peak) ++i;
    for (i *= CHUNK; x[i] != peak;) ++i;
    return i;
  }

  void set_temperature(float t) {
    temperature = t;
    // Where this would overflow only the largest logits have any mass.
    factor = float(std::min(1.4426950408889634 / double(t), double(FLT_MAX)));
  }

  // ---- mass, in float32: 1 at the peak ----

  Lanes mass(Lanes a) const { return power_of_two((a - lanes_of(peak)) * lanes_of(factor)); }

  float mass(float value) const {
    alignas(64) float out[LANES];
    store(out, mass(lanes_of(value)));
    return out[0];
  }

  // What `keep` (a mask of lanes for a first id, logits and their mass) leaves of a block's mass.
  template <class F>
  float block_mass(int block, F&& keep) const {
    Lanes acc = lanes_of(0.0f);
    each(block * BLOCK, std::min(vocab, (block + 1) * BLOCK), [&](int i, Lanes a, int) {
      const Lanes m = mass(a);
      acc = acc + only(keep(i, a, m), m);
    });
    return total(acc);
  }

  // The same of all blocks, cumulated.
  template <class F>
  double cumulate(F&& keep) {
    double so_far = 0;
    const int blocks = (vocab + BLOCK - 1) / BLOCK;
    for (int block = 0; block < blocks; ++block)
      space.cumulated[block] = so_far += double(block_mass(block, keep));
    return so_far;
  }

  template <class F>
  double mass_where(F&& keep) const {
    double so_far = 0;
    const int blocks = (vocab + BLOCK - 1) / BLOCK;
    for (int block = 0; block < blocks; ++block) so_far += double(block_mass(block, keep));
    return so_far;
  }

  // The token where the mass that `keep` leaves, cumulated by id, exceeds the share `u` of it. `cumulate` came before.
  template <class F>
  int draw_by_id(double u, F&& keep) const {
    const int blocks = (vocab + BLOCK - 1) / BLOCK;
    const double* cumulated = space.cumulated.data();
    const double all = cumulated[blocks - 1], target = std::min(u * all, std::nextafter(all, 0.0));
    const int block = int(std::upper_bound(cumulated, cumulated + blocks, target) - cumulated);
    const double rest = target - (block ? cumulated[block - 1] : 0.0);
    float inside[BLOCK];
    int count = 0;
    each(block * BLOCK, std::min(vocab, (block + 1) * BLOCK), [&](int i, Lanes a, int n) {
      const Lanes m = mass(a);
      alignas(64) float part[LANES];
      store(part, only(keep(i, a, m), m));
      for (int j = 0; j < n; ++j) inside[count++] = part[j];
    });
    double so_far = 0;
    int last = 0;
    for (int j = 0; j < count; ++j) {
      so_far += double(inside[j]);
      if (inside[j] > 0) last = j;
      if (so_far > rest) return block * BLOCK + j;
    }
    return block * BLOCK + last;  // rounding: the block's sum was a little more than its parts'
  }

  // ---- short heads ----

  // At least `count` of the first places, or all of the logits above `floor`, sorted, with others behind; says how many
  // there are. At most `count` are sorted.
  int head(int count, float floor) {
    Place* places = space.places.data();
    float* picked = space.picked.data();
    const int all = chunks();
    int parts = all;
    float threshold = floor;
    if (count * 4 <= all * 3) {
      memcpy(picked, space.maxima.data(), sizeof(float) * all);
    } else {  // too many for so few maxima to tell them from the rest: smaller chunks
      parts = 0;
      each(0, vocab, [&](int, Lanes a, int) { picked[parts++] = largest(a); });
    }
    if (count <= parts) {
      std::nth_element(picked, picked + (count - 1), picked + parts, std::greater<float>());
      threshold = std::max(picked[count - 1], floor);
    }
    int found = 0;
    for (int chunk = 0; chunk < all; ++chunk) {
      if (!(space.maxima[chunk] >= threshold)) continue;
      each(chunk * CHUNK, std::min(vocab, (chunk + 1) * CHUNK), [&](int i, Lanes a, int n) {
        uint32_t mask = at_least(a, lanes_of(threshold));
        if (n < LANES) mask &= (1u << n) - 1;
        for (; mask; mask &= mask - 1) {
          const int id = i + __builtin_ctz(mask);
          places[found++] = place_of(x[id], id);
        }
      });
    }
    const int sorted = std::min(count, found);
    if (sorted < found) std::nth_element(places, places + sorted, places + found, std::greater<Place>());
    std::sort(places, places + sorted, std::greater<Place>());
    return found;
  }

  // The token of a sorted head of `count`, of which top_p keeps its share of `of` (or of the head's own mass, if that is
  // negative), with everything in float64. -1 where the nucleus is not known to end within the head: `open` says that
  // there are more tokens behind it.
  int draw_from_head(int count, double of, bool open, const RowParams& p, double u) {
    const Place* places = space.places.data();
    double* mass = space.mass.data();
    double all = 0;
    for (int i = 0; i < count; ++i) {
      mass[i] = std::exp((double(value_of(places[i])) - double(peak)) / double(temperature));
      all += mass[i];
    }
    int kept = count;
    if (p.top_p < 1.0f) {
      const double share = double(p.top_p) * (of < 0 ? all : of);
      double before = 0;
      for (kept = 0; kept < count && before < share; ++kept) before += mass[kept];
      // Tokens equal to the last one may stand behind the head.
      if (open && (kept == count || value_of(places[kept - 1]) == value_of(places[count - 1])) && mass[count - 1] > 0)
        return -1;
    }
    kept = std::max(kept, 1);
    while (kept > 1 && mass[kept - 1] < double(p.min_p)) --kept;
    all = 0;
    for (int i = 0; i < kept; ++i) all += mass[i];
    const double target = std::min(u * all, std::nextafter(all, 0.0));
    double so_far = 0;
    for (int i = 0; i < kept; ++i)
      if ((so_far += mass[i]) > target) return id_of(places[i]);
    return id_of(places[0]);
  }

  // ---- long heads ----

  // A head's lanes: those up to a place, with at least so much mass.
  auto head_to(Place end, float least) const {
    const float value = value_of(end);
    const int id = id_of(end);
    return [=](int i, Lanes a, Lanes m) {
      const uint32_t here = i > id ? 0 : id - i >= LANES - 1 ? 0xffffu : (2u << (id - i)) - 1;
      const uint32_t more = above(a, lanes_of(value)), same = at_least(a, lanes_of(value)) & ~more;
      return (more | (same & here)) & at_least(m, lanes_of(least));
    };
  }

  // The first place of the head up to `end` where the weights, cumulated, exceed `target`, or only reach it. Weights are
  // the mass, or 1 each. Tokens with less mass than `least` weigh nothing.
  template <class Weight>
  Place descend(Place end, float least, double target, bool exceed, Weight&& weight) {
    double* by_digit = space.by_digit.data();
    Place* places = space.places.data();
    double before = 0;
    const auto reached = [&](double sum) { return exceed ? sum > target : sum >= target; };
    // Where the target lies; rounding may put it past the end, and then it is the last digit that has any weight.
    const auto find = [&](int digits) {
      int last = 0;
      for (int digit = digits - 1; digit >= 0; --digit) {
        if (by_digit[digit] <= 0) continue;
        last = digit;
        if (reached(before + by_digit[digit])) return digit;
        before += by_digit[digit];
      }
      before -= by_digit[last];
      return last;
    };
    // Two tables, since neighbours often have the same digit and would wait for each other.
    std::fill(by_digit, by_digit + DIGITS * 2, 0.0);
    const auto keep = head_to(end, least);
    for (int at = 0; at < vocab; at += BLOCK) {
      alignas(64) float masses[BLOCK];
      const int stop = std::min(vocab, at + BLOCK);
      uint32_t any = 0;
      each(at, stop, [&](int i, Lanes a, int) {
        const Lanes m = mass(a);
        const uint32_t kept = keep(i, a, m);
        any |= kept;
        store(masses + (i - at), only(kept, m));
      });
      if (!any) continue;
      for (int i = at; i < stop; ++i)
        by_digit[(ordered(x[i]) >> 21) + DIGITS * (i & 1)] += weight(masses[i - at]);
    }
    for (int digit = 0; digit < DIGITS; ++digit) by_digit[digit] += by_digit[DIGITS + digit];
    int digit = find(DIGITS), found = 0;
    float* masses = space.masses.data();
    // No logit has the key of the negative zero, whose value would be that of the other one.
    const uint32_t last = uint32_t(digit) << 21 | 0x1fffff;
    const float low = value_of(Place(digit) << 53), high = value_of(Place(last - (last == 0x7fffffff)) << 32);
    for (int chunk = 0; chunk < chunks(); ++chunk) {
      if (!(space.maxima[chunk] >= low)) continue;
      each(chunk * CHUNK, std::min(vocab, (chunk + 1) * CHUNK), [&](int i, Lanes a, int) {
        uint32_t here = at_least(a, lanes_of(low)) & ~above(a, lanes_of(high));
        if (!here) return;
        alignas(64) float part[LANES];
        const Lanes m = mass(a);
        here &= keep(i, a, m) & above(m, lanes_of(0.0f));
        store(part, m);
        for (; here; here &= here - 1) {
          const int j = __builtin_ctz(here);
          places[found] = place_of(x[i + j], i + j);
          masses[found++] = part[j];
        }
      });
    }
    for (const auto& [shift, bits] : {std::pair{42, 11}, std::pair{32, 10}}) {
      std::fill(by_digit, by_digit + DIGITS, 0.0);
      const Place ones = (Place(1) << bits) - 1;
      for (int i = 0; i < found; ++i) by_digit[places[i] >> shift & ones] += weight(masses[i]);
      digit = find(1 << bits);
      int left = 0;
      for (int i = 0; i < found; ++i)
        if (int(places[i] >> shift & ones) == digit) {
          places[left] = places[i];
          masses[left++] = masses[i];
        }
      found = left;
    }
    // All of one value now, by ascending id.
    int i = 0;
    while (i + 1 < found && !reached(before + weight(masses[i]))) before += weight(masses[i++]);
    return places[i];
  }

  // `end`: the last place that top_k keeps. top_p and min_p are still to come.
  int draw_by_digits(Place end, double of, const RowParams& p, double u) {
    const auto by_mass = [](float m) { return double(m); };
    if (p.top_p < 1.0f) end = descend(end, 0.0f, double(p.top_p) * of, false, by_mass);
    const double all = mass_where(head_to(end, p.min_p));
    return id_of(descend(end, p.min_p, std::min(u * all, std::nextafter(all, 0.0)), true, by_mass));
  }

  // ---- ways to draw ----

  int draw_from_nucleus(const RowParams& p) {
    const auto everything = [](int, Lanes, Lanes) { return 0xffffu; };
    sum = cumulate(everything);
    for (const int count : {FEW, WIDE}) {
      const int size = vocab <= WIDE ? vocab : count;
      const int found = head(size, -FLT_MAX);
      const int token = draw_from_head(std::min(size, found), sum, found >= size && size < vocab, p, uniform(p));
      if (token >= 0) return token;
    }
    for (int trial = 0; trial < TRIALS; ++trial) {
      const int token = draw_by_id(uniform(p, trial), everything);
      if (!(mass(x[token]) >= p.min_p)) continue;
      // Of the order, all that stands before it.
      const auto up_to = head_to(place_of(x[token], token), 0.0f);
      const double before = mass_where([&](int i, Lanes a, Lanes m) {
        const uint32_t self = token >= i && token < i + LANES ? 1u << (token - i) : 0;
        return up_to(i, a, m) & ~self;
      });
      if (before < double(p.top_p) * sum) return token;
    }
    return draw_by_digits(everyone(), sum, p, uniform(p, TRIALS));
  }

  int draw_from_top_k(const RowParams& p) {
    const int k = int(p.top_k);
    if (k <= SHORT) {
      const int found = head(k, -FLT_MAX);
      return draw_from_head(std::min(k, found), -1.0, false, p, uniform(p));
    }
    const Place end = descend(everyone(), 0.0f, double(k), false, [](float m) { return m > 0 ? 1.0 : 0.0; });
    const double of = p.top_p < 1.0f ? mass_where(head_to(end, 0.0f)) : 0.0;
    return draw_by_digits(end, of, p, uniform(p));
  }

  int draw(const RowParams& p) {
    set_temperature(p.temperature);
    if (p.top_k >= 1 && p.top_k < vocab) return draw_from_top_k(p);
    if (p.top_p < 1.0f) return draw_from_nucleus(p);
    const Lanes least = lanes_of(p.min_p);
    const auto likely = [=](int, Lanes, Lanes m) { return at_least(m, least); };
    cumulate(likely);
    return draw_by_id(uniform(p), likely);
  }

  // Infinite logits as the largest finite ones; false where no logit is finite.
  bool clamp() {
    bool finite = false;
    for (int i = 0; i < vocab; ++i) finite |= std::fabs(x[i]) <= FLT_MAX;
    if (finite)
      for (int i = 0; i < vocab; ++i) x[i] = std::min(x[i], FLT_MAX);
    return finite;
  }
};

// Tokens that `mask` has no bit for become impossible; where none of the others is possible, all of these become equally
// likely. As core.toolkit.token_mask does it.
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
