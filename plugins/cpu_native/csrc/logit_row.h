// A row of logits, the order of its tokens, and their mass.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lanes.h"

namespace {

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

// A row of logits: its peak, and the mass of its tokens.
struct LogitRow {
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

  // Infinite logits as the largest finite ones; false where no logit is finite.
  bool clamp() {
    bool finite = false;
    for (int i = 0; i < vocab; ++i) finite |= std::fabs(x[i]) <= FLT_MAX;
    if (finite)
      for (int i = 0; i < vocab; ++i) x[i] = std::min(x[i], FLT_MAX);
    return finite;
  }
};

}  // namespace
