// Ways to draw a token of a row.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>

#include "heads.h"
#include "logit_row.h"
#include "noise.h"
#include "sample_params.h"

namespace {

// The token with the largest logit / temperature + noise, of those put to it.
struct Race {
  const LogitRow& row;
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

struct SampledRow : RowHeads {
  using RowHeads::RowHeads;

  int draw(const RowParams& p) {
    set_temperature(p.temperature);
    if (p.top_k >= 1 && p.top_k < vocab) return draw_from_top_k(p);
    if (p.top_p < 1.0f) return draw_from_nucleus(p);
    return draw_where(p, everything);
  }

 private:
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

  // `end`: the last place that top_k keeps, with `of` the mass up to it. top_p and min_p are still to come.
  int draw_from_long(Place end, double of, const RowParams& p) {
    if (p.top_p < 1.0f) end = descend(end, double(p.top_p) * of, [](float m) { return double(m); });
    return draw_where(p, head_to(end));
  }

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
};

}  // namespace
