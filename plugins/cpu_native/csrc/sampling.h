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

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "lanes.h"
#include "noise.h"

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

// ---- a row ----

constexpr int CHUNK = 64;    // logits whose maximum is kept
constexpr int BLOCK = 256;   // logits whose mass is added up in float32
constexpr int FEW = 32;      // tokens that most nuclei have at most
constexpr int WIDE = 256;    // a nucleus with more of them is not collected
constexpr int TRIALS = 8;    // of guessing a token of a wide nucleus
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
  std::vector<double> by_digit, mass;
  std::vector<Place> places;

  void need(int vocab) {
    if (int(places.size()) >= vocab) return;
    places.resize(vocab);
    masses.resize(vocab);
    maxima.resize((vocab + CHUNK - 1) / CHUNK);
    picked.resize((vocab + LANES - 1) / LANES);
    by_digit.resize(DIGITS * 2);
    mass.resize(std::min(vocab, SHORT));
  }
};

struct SampledRow {
  float* x;  // [vocab]
  int vocab;
  SampleSpace& space;
  float peak = 0;
  float factor = 0;  // log2(e) / temperature
  float temperature = 1;

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

  static uint32_t everything(int, Lanes, Lanes) { return 0xffffu; }

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

  template <class F>
  double mass_where(F&& keep) const {
    double so_far = 0;
    const int blocks = (vocab + BLOCK - 1) / BLOCK;
    for (int block = 0; block < blocks; ++block) so_far += double(block_mass(block, keep));
    return so_far;
  }

  // ---- drawing ----

  // The token with the largest logit / temperature + noise, of those put to it.
  struct Race {
    const SampledRow& row;
    const Noise noise;
    double best = -INFINITY;
    double reach = INFINITY;  // where a token's mass times this is less than its rarity, it cannot win
    int winner = -1;

    void enter(int id) { enter(id, noise.bits(id)); }
    void enter(int id, int32_t bits) {
      const double score = (double(row.x[id]) - double(row.peak)) / double(row.temperature) + Noise::gumbel(bits);
      if (!(score > best)) return;
      best = score;
      winner = id;
      // Noise is at most -log(rarity). The mass may be wrong by rounding, and a little more.
      reach = std::exp(-best) * 1.0001;
    }
    bool may_win(int32_t bits, double mass) const { return Noise::rarity(bits) <= reach * mass; }
  };

  // The token that is drawn of those that min_p and `keep` leave, the first peak among them. Most chunks are passed
  // over by their largest logit and their largest noise.
  template <class F>
  int draw_where(const RowParams& p, F&& keep) const {
    Race race{*this, Noise(p.seed, p.step)};
    race.enter(first_peak());
    const float* maxima = space.maxima.data();
    alignas(64) float masses[LANES];
    for (int chunk = 0; chunk < chunks(); ++chunk) {
      if (chunk % LANES == 0) store(masses, mass(first_at(maxima + chunk, chunks() - chunk, -INFINITY)));
      const double largest = masses[chunk % LANES];
      if (largest * 1.0001 < double(p.min_p) || !race.may_win(INT32_MAX, largest)) continue;
      const Words enough = words_of(uint32_t(Noise::bits_for(race.reach * largest)));
      Words bits[CHUNK / LANES];
      race.noise.of_chunk(chunk * CHUNK, bits);
      if (!above(larger(larger(bits[0], bits[1]), larger(bits[2], bits[3])), enough)) continue;
      each(chunk * CHUNK, std::min(vocab, (chunk + 1) * CHUNK), [&](int i, Lanes a, int n) {
        uint32_t some = above(bits[(i - chunk * CHUNK) / LANES], enough);
        if (n < LANES) some &= (1u << n) - 1;
        if (!some) return;
        const Lanes m = mass(a);
        some &= keep(i, a, m) & at_least(m, lanes_of(p.min_p));
        alignas(64) float part[LANES];
        store(part, m);
        for (; some; some &= some - 1) {
          const int j = __builtin_ctz(some);
          const int32_t own = race.noise.bits(i + j);
          if (race.may_win(own, part[j])) race.enter(i + j, own);
        }
      });
    }
    return race.winner;
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

  // The token that is drawn of a sorted head of `count`, of which top_p keeps its share of `of` (or of the head's own
  // mass, if that is negative), with everything in float64. -1 where the nucleus is not known to end within the head:
  // `open` says that there are more tokens behind it.
  int draw_from_head(int count, double of, bool open, const RowParams& p) {
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
    Race race{*this, Noise(p.seed, p.step)};
    for (int i = 0; i < kept; ++i) {
      const int id = id_of(places[i]);
      const int32_t bits = race.noise.bits(id);
      if (race.may_win(bits, mass[i])) race.enter(id, bits);
    }
    return race.winner;
  }

  // ---- long heads ----

  // A head's lanes: those up to the token `id` with the logit `value`.
  static auto head_to(float value, int id) {
    return [=](int i, Lanes a, Lanes) {
      const uint32_t here = i > id ? 0 : id - i >= LANES - 1 ? 0xffffu : (2u << (id - i)) - 1;
      const uint32_t more = above(a, lanes_of(value)), same = at_least(a, lanes_of(value)) & ~more;
      return more | (same & here);
    };
  }

  static auto head_to(Place end) { return head_to(value_of(end), id_of(end)); }

  // The first place of the head up to `end` where the weights, cumulated, reach `target`. Weights are the mass, or 1
  // each.
  template <class Weight>
  Place descend(Place end, double target, Weight&& weight) {
    double* by_digit = space.by_digit.data();
    Place* places = space.places.data();
    double before = 0;
    // Where the target lies; rounding may put it past the end, and then it is the last digit that has any weight.
    const auto find = [&](int digits) {
      int last = 0;
      for (int digit = digits - 1; digit >= 0; --digit) {
        if (by_digit[digit] <= 0) continue;
        last = digit;
        if (before + by_digit[digit] >= target) return digit;
        before += by_digit[digit];
      }
      before -= by_digit[last];
      return last;
    };
    // Two tables, since neighbours often have the same digit and would wait for each other.
    std::fill(by_digit, by_digit + DIGITS * 2, 0.0);
    const auto keep = head_to(end);
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
      for (int i = at; i < stop; ++i) by_digit[(ordered(x[i]) >> 21) + DIGITS * (i & 1)] += weight(masses[i - at]);
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
    while (i + 1 < found && before + weight(masses[i]) < target) before += weight(masses[i++]);
    return places[i];
  }

  // `end`: the last place that top_k keeps, with `of` the mass up to it. top_p and min_p are still to come.
  int draw_from_long(Place end, double of, const RowParams& p) {
    if (p.top_p < 1.0f) end = descend(end, double(p.top_p) * of, [](float m) { return double(m); });
    return draw_where(p, head_to(end));
  }

  // ---- ways to draw ----

  int draw_from_nucleus(const RowParams& p) {
    const double sum = mass_where(everything);
    for (const int count : {FEW, WIDE}) {
      const int size = vocab <= WIDE ? vocab : count;
      const int found = head(size, -FLT_MAX);
      const int token = draw_from_head(std::min(size, found), sum, found >= size && size < vocab, p);
      if (token >= 0) return token;
    }
    // The best of all tokens is the best of the nucleus if it lies inside. If not, the nucleus ends before it, and so
    // does all that may still be drawn.
    int token = draw_where(p, everything);
    for (int trial = 0; trial < TRIALS; ++trial) {
      const float value = x[token];
      if (mass_where(head_to(value, token - 1)) < double(p.top_p) * sum) return token;
      token = draw_where(p, head_to(value, token - 1));
    }
    return draw_from_long(everyone(), sum, p);
  }

  int draw_from_top_k(const RowParams& p) {
    const int k = int(p.top_k);
    if (k <= SHORT) {
      const int found = head(k, -FLT_MAX);
      return draw_from_head(std::min(k, found), -1.0, false, p);
    }
    const Place end = descend(everyone(), double(k), [](float m) { return m > 0 ? 1.0 : 0.0; });
    const double of = p.top_p < 1.0f ? mass_where(head_to(end)) : 0.0;
    return draw_from_long(end, of, p);
  }

  int draw(const RowParams& p) {
    set_temperature(p.temperature);
    if (p.top_k >= 1 && p.top_k < vocab) return draw_from_top_k(p);
    if (p.top_p < 1.0f) return draw_from_nucleus(p);
    return draw_where(p, everything);
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

// Tokens that `mask` has no bit for become impossible; where none of the others is possible, all of these become
// equally likely. As core.toolkit.token_mask does it.
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
