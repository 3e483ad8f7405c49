// Heads of the order of a row's tokens: short ones are collected and sorted, the end of long ones is found digit by
// digit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>

#include "logit_row.h"

namespace {

struct RowHeads : LogitRow {
  RowHeads(float* x, int vocab, SampleSpace& space) : LogitRow{x, vocab, space} {}

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
    float* masses = space.masses.data();
    double before = 0;
    weigh_digits(end, weight);
    int digit = find_digit(DIGITS, target, before), found = gather(end, digit);
    for (const auto& [shift, bits] : {std::pair{42, 11}, std::pair{32, 10}}) {
      std::fill(by_digit, by_digit + DIGITS, 0.0);
      const Place ones = (Place(1) << bits) - 1;
      for (int i = 0; i < found; ++i) by_digit[places[i] >> shift & ones] += weight(masses[i]);
      digit = find_digit(1 << bits, target, before);
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

 private:
  // The digit where the target lies, with `before` the weight of what stands in front of it; rounding may put the
  // target past the end, and then it is the last digit that has any weight.
  int find_digit(int digits, double target, double& before) const {
    const double* by_digit = space.by_digit.data();
    int last = 0;
    for (int digit = digits - 1; digit >= 0; --digit) {
      if (by_digit[digit] <= 0) continue;
      last = digit;
      if (before + by_digit[digit] >= target) return digit;
      before += by_digit[digit];
    }
    before -= by_digit[last];
    return last;
  }

  // The weight of each first digit in the head up to `end`, into `by_digit`.
  template <class Weight>
  void weigh_digits(Place end, Weight&& weight) {
    double* by_digit = space.by_digit.data();
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
  }

  // Places and masses of those tokens of the head up to `end` that begin with a digit; says how many there are.
  int gather(Place end, int digit) {
    Place* places = space.places.data();
    int found = 0;
    const auto keep = head_to(end);
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
    return found;
  }
};

}  // namespace
