// Gumbel noise that a seed, a step and a token id decide, as in toolkit/sampling/noise.py: the same bits, to the
// last one, so that both draw the same tokens.
#pragma once

#include <cmath>
#include <cstdint>

#include "lanes.h"

namespace {

// splitmix64's finaliser.
inline uint64_t mixed(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// 32 bits per token, as a signed number; larger is more noise.
class Noise {
 public:
  Noise(int64_t seed, int64_t step) {
    constexpr uint64_t gamma = 0x9E3779B97F4A7C15u;
    const uint64_t key = mixed(mixed(uint64_t(seed) + gamma) + (uint64_t(step) + 1) * gamma);
    low_ = uint32_t(key), high_ = uint32_t(key >> 32);
  }

  int32_t bits(int id) const {
    uint32_t z = uint32_t(id) * SPREAD + low_;
    z = (z ^ (z >> 16)) * WORD_1;
    z = (z ^ (z >> 15) ^ high_) * WORD_2;
    return int32_t(z ^ (z >> 16));
  }

  // Of four times sixteen ids, from `first` on.
  void of_chunk(int first, Words (&bits)[4]) const {
    Words z = places() + words_of(uint32_t(first) * SPREAD + low_);
    for (int i = 0; i < 4; ++i, z = z + words_of(LANES * SPREAD)) {
      const Words a = (z ^ shifted<16>(z)) * words_of(WORD_1);
      const Words b = (a ^ shifted<15>(a) ^ words_of(high_)) * words_of(WORD_2);
      bits[i] = b ^ shifted<16>(b);
    }
  }

  // -log(-log(u)) of u in the middle of the 2^32 parts of the unit interval.
  static double gumbel(int32_t bits) { return -std::log(-std::log((double(bits) + 0x1p31 + 0.5) * 0x1p-32)); }

  // 1 - u. The noise is at most -log of it.
  static double rarity(int32_t bits) { return (0x1p31 - 0.5 - double(bits)) * 0x1p-32; }

  // Tokens whose rarity is below `reach` have more bits than this, and a few others may. Where all are below it, the
  // least noise of all is left out, with which no token but the peak can win.
  static int32_t bits_for(double reach) {
    const double least = 0x1p31 - 2 - reach * 0x1p32;
    return least > double(INT32_MIN) ? int32_t(least) : INT32_MIN;
  }

 private:
  static constexpr uint32_t SPREAD = 0x9E3779B9u, WORD_1 = 0x7FEB352Du, WORD_2 = 0x846CA68Bu;
  uint32_t low_, high_;

  static Words places() {
    alignas(64) uint32_t at[LANES];
    for (int i = 0; i < LANES; ++i) at[i] = uint32_t(i) * SPREAD;
    return words_at(at);
  }
};

}  // namespace
