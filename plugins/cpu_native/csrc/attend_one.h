// Attention of one query per head.
//
// Keys and values are read where they are, all KV heads of a slot together, and each once. Scores are [keys][16
// columns], a column per query head: with tiles, keys are the left side of a product whose right side is made of the
// queries, and the softmax of 16 heads needs neither a transposition nor a sum across lanes.
#pragma once

#include <algorithm>
#include <cstdint>

#include <immintrin.h>

#include "attend_many.h"
#include "numbers.h"

namespace {

constexpr int COLUMNS = 16;
constexpr int BITE = 16;  // keys at a time: few, so that asking for the next ones is spread over all there is to do

// Asks memory for the keys and values of the next bite while this one is worked on, line by line in the order in which
// they lie, a line of both in turn. A core waits for a dozen lines or so at a time, whoever asked for them; lines that
// follow each other make the second level's own prefetcher join in, and that one waits for more.
class Ahead {
 public:
  // Values and keys of slot 0, and how many bytes of each slot are read there; slots are `stride` numbers apart.
  Ahead(const bf16* values, const bf16* keys, size_t stride, size_t bytes)
      : base_((const char*)values), to_keys_((const char*)keys - base_), stride_(stride * sizeof(bf16)), bytes_(bytes) {
  }

  // What comes next: n slots.
  void begin(const int32_t* slots, int n) {
    slots_ = slots;
    left_ = n * lines_of_slot();
    line_ = 0;
    if (n > 0) at_ = base_ + size_t(*slots) * stride_;
  }

  int lines_of_slot() const { return int((bytes_ + 63) / 64); }

  void ask(int lines) {
    for (; lines > 0 && left_ > 0; --lines, --left_) {
      _mm_prefetch(at_ + line_, _MM_HINT_T0);
      _mm_prefetch(at_ + line_ + to_keys_, _MM_HINT_T0);
      line_ += 64;
      if (line_ < bytes_) continue;
      line_ = 0;
      if (left_ > 1) at_ = base_ + size_t(*++slots_) * stride_;
    }
  }

 private:
  const char* base_;
  ptrdiff_t to_keys_;
  size_t stride_, bytes_, line_ = 0;
  const char* at_ = nullptr;
  const int32_t* slots_ = nullptr;
  int left_ = 0;
};

#ifdef PB_AVX512
// sums[H heads][dims] += weight * value, for P pairs of 16 dimensions: even ones in one register, odd ones in another.
template <int H, int P>
inline void weigh_some(const bf16* values, size_t stride, const int32_t* slots, int n, const __mmask32* real,
                       const float* weights, float* sums, int dp, int lines, Ahead& ahead) {
  const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
  __m512 acc[H][P][2];
  for (int i = 0; i < H; ++i)
    for (int p = 0; p < P; ++p)
      for (int o = 0; o < 2; ++o) acc[i][p][o] = _mm512_loadu_ps(sums + size_t(i) * dp + p * 32 + o * 16);
  for (int j = 0; j < n; ++j) {
    const bf16* v = values + slots[j] * stride;
    ahead.ask(lines);
    for (int p = 0; p < P; ++p) {
      const __m512i both = _mm512_maskz_loadu_epi16(real[p], v + p * 32);
      const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
      const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(both, upper));
      for (int i = 0; i < H; ++i) {
        const __m512 weight = _mm512_set1_ps(weights[j * COLUMNS + i]);
        acc[i][p][0] = _mm512_fmadd_ps(weight, even, acc[i][p][0]);
        acc[i][p][1] = _mm512_fmadd_ps(weight, odd, acc[i][p][1]);
      }
    }
  }
  for (int i = 0; i < H; ++i)
    for (int p = 0; p < P; ++p)
      for (int o = 0; o < 2; ++o) _mm512_storeu_ps(sums + size_t(i) * dp + p * 32 + o * 16, acc[i][p][o]);
}

template <int P>
inline void weigh_heads(int heads, const bf16* values, size_t stride, const int32_t* slots, int n,
                        const __mmask32* real, const float* weights, float* sums, int dp, int lines, Ahead& ahead) {
  switch (heads) {
    case 1: return weigh_some<1, P>(values, stride, slots, n, real, weights, sums, dp, lines, ahead);
    case 2: return weigh_some<2, P>(values, stride, slots, n, real, weights, sums, dp, lines, ahead);
    case 3: return weigh_some<3, P>(values, stride, slots, n, real, weights, sums, dp, lines, ahead);
    default: return weigh_some<4, P>(values, stride, slots, n, real, weights, sums, dp, lines, ahead);
  }
}
#endif

// sums float [g][dp] of one KV head += weights [n][COLUMNS] * its values. Dimensions are in the order of `in_order`.
inline void weigh_values(const bf16* values, size_t stride, const int32_t* slots, int n, int g, int dim, int dp,
                         const float* weights, float* sums, Ahead& ahead) {
#ifdef PB_AVX512
  for (int d = 0; d < dp; d += 64) {
    const __mmask32 real[2] = {first_of_32(dim - d), first_of_32(std::max(0, dim - d - 32))};
    for (int i = 0; i < g; i += 4) {
      const int heads = std::min(4, g - i), lines = i == 0;
      float* to = sums + size_t(i) * dp + d;
      if (d + 32 < dp)
        weigh_heads<2>(heads, values + d, stride, slots, n, real, weights + i, to, dp, lines, ahead);
      else
        weigh_heads<1>(heads, values + d, stride, slots, n, real, weights + i, to, dp, lines, ahead);
    }
  }
#else
  (void)ahead;
  for (int j = 0; j < n; ++j) {
    const bf16* v = values + slots[j] * stride;
    for (int i = 0; i < g; ++i) {
      const float weight = weights[j * COLUMNS + i];
      float* sum = sums + size_t(i) * dp;
      for (int d = 0; d < dim; ++d) sum[d] += weight * to_float(v[d]);
    }
  }
#endif
}

// What `weigh_values` has summed up, dimension by dimension.
inline void in_order(float* sums, int dp) {
#ifdef PB_AVX512
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int d = 0; d < dp; d += 32) {
    const __m512 even = _mm512_loadu_ps(sums + d), odd = _mm512_loadu_ps(sums + d + 16);
    _mm512_storeu_ps(sums + d, _mm512_permutex2var_ps(even, low, odd));
    _mm512_storeu_ps(sums + d + 16, _mm512_permutex2var_ps(even, high, odd));
  }
#else
  (void)sums, (void)dp;
#endif
}

}  // namespace
