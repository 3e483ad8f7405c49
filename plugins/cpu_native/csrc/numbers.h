// bf16 and float32, memory, and e^x.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include <immintrin.h>
#include <sys/mman.h>

#if defined(PB_AMX)
#define PB_AVX512 1
#endif

using bf16 = uint16_t;

namespace {

inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

inline bf16 to_bf16(float f) {  // to nearest even; NaN stays NaN
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return bf16((bits >> 16) | 0x40);
  return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

using float16 = uint16_t;

inline float float_of_16(float16 x) { return _cvtsh_ss(x); }

template <int ROUNDING = _MM_FROUND_TO_NEAREST_INT>
inline float16 to_float16(float x) {
  return float16(_cvtss_sh(x, ROUNDING));
}

// The smallest number that is larger; of the largest one, infinity.
inline float16 next_above(float16 x) {
  if (!(x & 0x8000)) return x + 1;
  return x == 0x8000 ? 1 : x - 1;
}

inline void floats_to_bf16(const float* from, bf16* to, int n) {
  int i = 0;
#ifdef PB_AVX512
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256((__m256i*)(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
#endif
  for (; i < n; ++i) to[i] = to_bf16(from[i]);
}

inline int round_up(int n, int to) { return (n + to - 1) / to * to; }

template <class T>
T* aligned(size_t n) {
  void* p = std::aligned_alloc(64, (n * sizeof(T) + 63) / 64 * 64);
  if (!p) throw std::bad_alloc();
  return static_cast<T*>(p);
}

template <class T>
struct Buffer {
  T* p = nullptr;
  size_t n = 0;
  T* need(size_t wanted) {
    if (wanted > n) {
      free(p);
      p = nullptr;
      n = 0;
      p = aligned<T>(wanted);
      memset(static_cast<void*>(p), 0, wanted * sizeof(T));
      n = wanted;
    }
    return p;
  }
  ~Buffer() { free(p); }
};

// Ask for large pages in [p, p + bytes), which changes nothing but how fast it is found.
inline void large_pages(void* p, size_t bytes) {
  constexpr uintptr_t page = uintptr_t(2) << 20;
  const uintptr_t from = (uintptr_t(p) + page - 1) / page * page, to = (uintptr_t(p) + bytes) / page * page;
  if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
}

// Memory for weights, in large pages where the system gives them: with small ones a step spends a tenth of its time on
// finding out where they are.
class Arena {
 public:
  // `bytes`, at a multiple of 64. Throws std::bad_alloc.
  uint8_t* take(size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    if (bytes > left_) {
      constexpr size_t page = size_t(2) << 20, chunk = size_t(32) << 20;
      const size_t size = (std::max(bytes, chunk) + page - 1) / page * page;
      uint8_t* p = static_cast<uint8_t*>(std::aligned_alloc(page, size));
      if (!p) throw std::bad_alloc();
      chunks_.push_back(p);
      large_pages(p, size);
      at_ = p;
      left_ = size;
    }
    uint8_t* p = at_;
    at_ += bytes;
    left_ -= bytes;
    return p;
  }
  // Where it stands, to give back later what was taken since.
  struct Mark {
    uint8_t* at;
    size_t left, chunks;
  };
  Mark mark() const { return {at_, left_, chunks_.size()}; }
  void back_to(const Mark& before) {
    for (; chunks_.size() > before.chunks; chunks_.pop_back()) free(chunks_.back());
    at_ = before.at, left_ = before.left;
  }

  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() {
    for (uint8_t* p : chunks_) free(p);
  }

 private:
  std::vector<uint8_t*> chunks_;
  uint8_t* at_ = nullptr;
  size_t left_ = 0;
};

#ifdef PB_AVX512
// Of 16 rows of 16 numbers of 32 bits.
inline void transpose16(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

// e^x for x <= 87, by a polynomial of 2^f (relative error below 2e-7, which float32 and bf16 weights do not see).
inline __m512 exp512(__m512 x) {
  const __m512 t = _mm512_mul_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.3f)), _mm512_set1_ps(1.44269504f));
  const __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(t, whole);
  __m512 y = _mm512_set1_ps(1.535336188e-4f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.339887440e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.618437357e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.550332548e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.402264689e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.931472028e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, whole);
}

// x / (1 + e^-x). The reciprocal is refined once: its error is far below what bf16 sees.
inline __m512 silu512(__m512 x) {
  // Beyond +-80 nothing changes any more, and e^80 is finite.
  const __m512 e = exp512(_mm512_min_ps(_mm512_sub_ps(_mm512_setzero_ps(), x), _mm512_set1_ps(80.0f)));
  const __m512 d = _mm512_add_ps(_mm512_set1_ps(1.0f), e);
  const __m512 r = _mm512_rcp14_ps(d);
  return _mm512_mul_ps(x, _mm512_mul_ps(r, _mm512_fnmadd_ps(d, r, _mm512_set1_ps(2.0f))));
}
#endif

}  // namespace
