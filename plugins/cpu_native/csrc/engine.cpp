// One forward pass of a dense decoder (Llama, Mistral, Qwen2, Qwen3) on a CPU, over paged KV, in one call.
//
// All threads run the same program and meet at barriers; between two of them they take pieces of the work from a counter,
// so that a thread whose core is wanted elsewhere does less. Weights and KV are bf16, sums and the residual are float32.
//
// Compiled once per instruction set: PB_AMX (tiles; implies AVX-512 and its bf16 dot product), PB_AVX512 (the latter
// alone), or neither (whatever the compiler vectorises of plain loops).

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include <immintrin.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(PB_AMX)
#define PB_AVX512 1
#endif

using bf16 = uint16_t;

namespace {

// ---- numbers -----------------------------------------------------------------------------------------------------------

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

#ifdef PB_AVX512
// e^x for x <= 0, by a polynomial of 2^f (relative error below 2e-7, which float32 and bf16 weights do not see).
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
#endif

// ---- threads -----------------------------------------------------------------------------------------------------------

inline void relax(int& spins) {
  // A waiting thread soon lets others have its core: one that spins would keep the very thread it waits for off it.
  if (++spins < 400)
    _mm_pause();
  else
    sched_yield();
}

class Team {
 public:
  explicit Team(int n) : n_(n) {
    for (int i = 1; i < n; ++i) threads_.emplace_back([this, i] { serve(i); });
  }
  ~Team() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      epoch_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto& t : threads_) t.join();
  }
  int size() const { return n_; }

  template <class F>
  void run(F&& f) {
    call_ = [](void* arg, int id) { (*static_cast<std::remove_reference_t<F>*>(arg))(id); };
    arg_ = &f;
    left_.store(n_ - 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      epoch_.fetch_add(1, std::memory_order_release);
    }
    if (n_ > 1) wake_.notify_all();
    f(0);
    int spins = 0;
    while (left_.load(std::memory_order_acquire)) relax(spins);
  }

  void barrier() {
    if (n_ == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == n_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    int spins = 0;
    while (phase_.load(std::memory_order_acquire) == phase) relax(spins);
  }

 private:
  void serve(int id) {
    uint32_t seen = 0;
    for (;;) {
      // Two steps follow each other within a fraction of a millisecond while requests run.
      for (int i = 0; i < 2000 && epoch_.load(std::memory_order_acquire) == seen; ++i) _mm_pause();
      if (epoch_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return epoch_.load() != seen; });
      }
      seen = epoch_.load(std::memory_order_acquire);
      if (stop_) return;
      call_(arg_, id);
      left_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  const int n_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint32_t> epoch_{0}, phase_{0};
  std::atomic<int> left_{0}, arrived_{0};
  std::atomic<bool> stop_{false};
  void (*call_)(void*, int) = nullptr;
  void* arg_ = nullptr;
};

// ---- tiles -------------------------------------------------------------------------------------------------------------

#ifdef PB_AMX
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t colsb[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 3 are sums [m0|m1, 16], 4 and 5 the left side [m0|m1, 32], 6 and 7 the right side [16 pairs, 16].
thread_local int tiles_m0 = -1, tiles_m1 = -1;

inline void set_tiles(int m0, int m1) {
  if (m0 == tiles_m0 && m1 == tiles_m1) return;
  TileConfig c;
  for (int t = 0; t < 8; ++t) c.colsb[t] = 64;
  const int n1 = m1 ? m1 : 1;
  const int rows[8] = {m0, m0, n1, n1, m0, n1, 16, 16};
  for (int t = 0; t < 8; ++t) c.rows[t] = uint8_t(rows[t]);
  _tile_loadconfig(&c);
  tiles_m0 = m0;
  tiles_m1 = m1;
}

inline void release_tiles() {
  _tile_release();
  tiles_m0 = tiles_m1 = -1;
}
#else
inline void release_tiles() {}
#endif

// ---- matrices ----------------------------------------------------------------------------------------------------------

// A weight [n, k], packed: blocks of 16 rows, in each of them steps of 32 columns, in each of these 16 pairs of columns,
// in each pair 16 rows x 2. That is what a tile loads, what a bf16 dot product reads, and plain enough for other code.
struct Matrix {
  int n = 0, k = 0, n_pad = 0, k_pad = 0;
  bf16* data = nullptr;

  // `rows_of` has n pointers to k numbers each; null stands for zeros.
  void pack(const bf16* const* rows_of, int n_, int k_) {
    n = n_, k = k_, n_pad = round_up(n, 32), k_pad = round_up(k, 32);
    free(data);
    data = aligned<bf16>(size_t(n_pad) * k_pad);
    for (int nb = 0; nb < n_pad / 16; ++nb)
      for (int kb = 0; kb < k_pad / 32; ++kb) {
        alignas(64) bf16 part[16][32] = {};
        for (int j = 0; j < 16; ++j) {
          const int row = nb * 16 + j, columns = std::min(32, k - kb * 32);
          if (row < n && rows_of[row]) memcpy(part[j], rows_of[row] + kb * 32, sizeof(bf16) * columns);
        }
        uint32_t* tile = reinterpret_cast<uint32_t*>(at(nb, kb));
        const uint32_t* pairs = reinterpret_cast<const uint32_t*>(&part[0][0]);
        for (int p = 0; p < 16; ++p)
          for (int j = 0; j < 16; ++j) tile[p * 16 + j] = pairs[j * 16 + p];
      }
  }
  bf16* at(int nb, int kb) const { return data + (size_t(nb) * (k_pad / 32) + kb) * 512; }
  ~Matrix() { free(data); }
};

constexpr int MB = 32, NB = 32;  // a block of sums

// c[MB][NB] = a[m, k] * w[32 rows from n-block nb (of 32), k]^T, for m <= 32 rows of `a` with row stride `lda`.
inline void block(const bf16* a, int lda, int m, const Matrix& w, int nb, float* c) {
  const int steps = w.k_pad / 32;
#if defined(PB_AMX)
  const int m0 = std::min(m, 16), m1 = m - m0;
  set_tiles(m0, m1);
  const bf16 *b0 = w.at(nb * 2, 0), *b1 = w.at(nb * 2 + 1, 0);
  const size_t stride = size_t(lda) * 2;
  _tile_zero(0);
  _tile_zero(1);
  if (m1) {
    _tile_zero(2);
    _tile_zero(3);
    for (int s = 0; s < steps; ++s) {
      _tile_loadd(4, a + s * 32, stride);
      _tile_loadd(6, b0 + s * 512, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b1 + s * 512, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a + size_t(16) * lda + s * 32, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(2, c + 16 * NB, NB * 4);
    _tile_stored(3, c + 16 * NB + 16, NB * 4);
  } else {
    for (int s = 0; s < steps; ++s) {
      _mm_prefetch((const char*)(b0 + (s + 4) * 512), _MM_HINT_T0);
      _mm_prefetch((const char*)(b1 + (s + 4) * 512), _MM_HINT_T0);
      _tile_loadd(4, a + s * 32, stride);
      _tile_loadd(6, b0 + s * 512, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b1 + s * 512, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
  }
  _tile_stored(0, c, NB * 4);
  _tile_stored(1, c + 16, NB * 4);
#elif defined(PB_AVX512)
  const bf16 *b0 = w.at(nb * 2, 0), *b1 = w.at(nb * 2 + 1, 0);
  for (int r = 0; r < m; r += 8) {
    const int rows = std::min(8, m - r);
    __m512 s0[8], s1[8];
    for (int i = 0; i < 8; ++i) s0[i] = s1[i] = _mm512_setzero_ps();
    for (int p = 0; p < steps * 16; ++p) {
      const __m512bh x = (__m512bh)_mm512_loadu_si512(b0 + p * 32), y = (__m512bh)_mm512_loadu_si512(b1 + p * 32);
      for (int i = 0; i < 8; ++i) {
        if (i >= rows) break;
        int32_t pair;
        memcpy(&pair, a + size_t(r + i) * lda + p * 2, 4);
        const __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
        s0[i] = _mm512_dpbf16_ps(s0[i], left, x);
        s1[i] = _mm512_dpbf16_ps(s1[i], left, y);
      }
    }
    for (int i = 0; i < rows; ++i) {
      _mm512_storeu_ps(c + (r + i) * NB, s0[i]);
      _mm512_storeu_ps(c + (r + i) * NB + 16, s1[i]);
    }
  }
#else
  memset(c, 0, sizeof(float) * MB * NB);
  for (int half = 0; half < 2; ++half)
    for (int p = 0; p < steps * 16; ++p) {
      const bf16* pairs = w.at(nb * 2 + half, 0) + p * 32;
      float even[16], odd[16];
      for (int j = 0; j < 16; ++j) even[j] = to_float(pairs[j * 2]), odd[j] = to_float(pairs[j * 2 + 1]);
      for (int i = 0; i < m; ++i) {
        const float x = to_float(a[size_t(i) * lda + p * 2]), y = to_float(a[size_t(i) * lda + p * 2 + 1]);
        float* sum = c + i * NB + half * 16;
        for (int j = 0; j < 16; ++j) sum[j] += x * even[j] + y * odd[j];
      }
    }
#endif
}

// ---- the model ---------------------------------------------------------------------------------------------------------

enum Activation { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3 };

inline float activate(float x, int kind) {
  switch (kind) {
    case SILU: return x / (1.0f + std::exp(-x));
    case GELU: return 0.5f * x * (1.0f + std::erf(x * 0.70710678f));
    case GELU_TANH: return 0.5f * x * (1.0f + std::tanh(0.79788456f * (x + 0.044715f * x * x * x)));
    default: return x > 0 ? x : 0;
  }
}

struct Layer {
  Matrix qkv, o, gate_up, down;
  std::vector<float> norm1, norm2, q_norm, k_norm, qkv_bias, o_bias, gate_up_bias, down_bias;
  int window = 0;
};

}  // namespace

extern "C" {

struct PbShape {
  int32_t vocab, hidden, inter, layers, heads, kv_heads, head_dim, act, qk_norm, threads;
  float eps, scale;
};

struct PbLayerWeights {
  const bf16 *q, *k, *v, *o, *gate, *up, *down;
  const float *norm1, *norm2, *q_norm, *k_norm, *q_bias, *k_bias, *v_bias, *o_bias, *gate_bias, *up_bias, *down_bias;
  int32_t window;
};

// Arrays as in ForwardBatch; `starts` has batch + 1 entries. cos and sin are float [tokens, head_dim / 2].
struct PbBatch {
  int32_t tokens, batch, sampled, hidden_count;
  const int64_t *ids, *rows, *seq_lens, *starts, *out_loc, *sample_rows, *hidden_rows;
  const float *embeds, *cos, *sin;
  const int32_t* table;
  int64_t table_stride;
  bf16* const* keys;
  bf16* const* values;
  float* logits;       // [sampled, vocab], or null
  int64_t* greedy;     // [sampled]: first largest logit of each row, or null
  float* hidden;       // [hidden_count, hidden]: after the final norm, or null
};

}  // extern "C"

namespace {

struct Best {
  float value;
  int32_t id;
};

struct ThreadSpace {
  Buffer<Best> best;
  Buffer<float> c, scores, sums, probs_f;
  Buffer<bf16> q, k, probs;
};

struct Model {
  PbShape s;
  Team team;
  std::vector<Layer> layers;
  std::vector<float> final_norm;
  Matrix head;
  const bf16* embedding = nullptr;
  std::vector<ThreadSpace> space;
  Buffer<float> x, qkv;
  Buffer<bf16> h, attended, act, packed_k, packed_v;
  std::vector<std::atomic<int>> counters;

  explicit Model(const PbShape& shape)
      : s(shape), team(shape.threads), layers(shape.layers), space(shape.threads), counters(size_t(shape.layers) * 9 + 8) {}

  int q_size() const { return s.heads * s.head_dim; }
  int kv_size() const { return s.kv_heads * s.head_dim; }
  int group() const { return s.heads / s.kv_heads; }
};

// out[i] = x[i] / rms(x) * weight[i]
inline void rms_norm(const float* x, const float* weight, int n, float eps, bf16* out) {
  float sum = 0;
  int i = 0;
#ifdef PB_AVX512
  __m512 acc = _mm512_setzero_ps();
  for (; i + 16 <= n; i += 16) {
    const __m512 v = _mm512_loadu_ps(x + i);
    acc = _mm512_fmadd_ps(v, v, acc);
  }
  sum = _mm512_reduce_add_ps(acc);
#endif
  for (; i < n; ++i) sum += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(sum / n + eps);
  i = 0;
#ifdef PB_AVX512
  const __m512 factor = _mm512_set1_ps(scale);
  for (; i + 16 <= n; i += 16) {
    const __m512 v = _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), factor), _mm512_loadu_ps(weight + i));
    _mm256_storeu_si256((__m256i*)(out + i), (__m256i)_mm512_cvtneps_pbh(v));
  }
#endif
  for (; i < n; ++i) out[i] = to_bf16(x[i] * scale * weight[i]);
}

// A head's vector: normalised where the model does that, then turned.
inline void turn(float* v, const float* norm, const float* cos, const float* sin, int dim, float eps) {
  if (norm) {
    float sum = 0;
    for (int i = 0; i < dim; ++i) sum += v[i] * v[i];
    const float scale = 1.0f / std::sqrt(sum / dim + eps);
    for (int i = 0; i < dim; ++i) v[i] *= scale * norm[i];
  }
  const int half = dim / 2;
  for (int i = 0; i < half; ++i) {
    const float a = v[i], b = v[i + half];
    v[i] = a * cos[i] - b * sin[i];
    v[i + half] = b * cos[i] + a * sin[i];
  }
}

// One run of work that threads share: `take` gives pieces until none is left.
struct Shared {
  std::atomic<int>& next;
  int total, piece;
  bool take(int& from, int& to) {
    from = next.fetch_add(piece, std::memory_order_relaxed);
    if (from >= total) return false;
    to = std::min(total, from + piece);
    return true;
  }
};

// Every block of a[m, k] * w^T goes to `done(row, rows, block of 32 columns, sums)`.
template <class F>
void product(Shared work, const bf16* a, int lda, int m, const Matrix& w, float* c, F&& done) {
  int from, to;
  while (work.take(from, to))
    for (int nb = from; nb < to; ++nb)
      for (int r = 0; r < m; r += MB) {
        const int rows = std::min(MB, m - r);
        block(a + size_t(r) * lda, lda, rows, w, nb, c);
        done(r, rows, nb, c);
      }
}

struct Forward {
  Model& m;
  const PbBatch& b;
  int phase = 0;  // each thread counts for itself, all alike

  Shared share(int& counter, int total, int piece) { return Shared{m.counters[counter++], total, std::max(1, piece)}; }

  void rows_normed(Shared work, const std::vector<float>& weight) {
    const int hidden = m.s.hidden, ldh = m.head.k_pad;
    int from, to;
    while (work.take(from, to))
      for (int t = from; t < to; ++t)
        rms_norm(m.x.p + size_t(t) * hidden, weight.data(), hidden, m.s.eps, m.h.p + size_t(t) * ldh);
  }

  // Query and key of one token and KV head are turned, key and value stored.
  void enter_head(const Layer& layer, int l, int t, int kvh) {
    const PbShape& s = m.s;
    const int dim = s.head_dim, half = dim / 2, g = m.group();
    float* row = m.qkv.p + size_t(t) * m.layers[0].qkv.n_pad;
    const float *cos = b.cos + size_t(t) * half, *sin = b.sin + size_t(t) * half;
    for (int i = 0; i < g; ++i)
      turn(row + (kvh * g + i) * dim, s.qk_norm ? layer.q_norm.data() : nullptr, cos, sin, dim, s.eps);
    float *k = row + m.q_size() + kvh * dim, *v = row + m.q_size() + m.kv_size() + kvh * dim;
    turn(k, s.qk_norm ? layer.k_norm.data() : nullptr, cos, sin, dim, s.eps);
    const size_t at = (size_t(b.out_loc[t]) * s.kv_heads + kvh) * dim;
    floats_to_bf16(k, b.keys[l] + at, dim);
    floats_to_bf16(v, b.values[l] + at, dim);
  }

  void decode(const Layer& layer, int l, int r, int kvh, ThreadSpace& space);
  void extend(const Layer& layer, int l, int r, int kvh, int first, int count, ThreadSpace& space);
  void run(int id);
};

// Attention of one new token of request r for the query heads of one KV head.
void Forward::decode(const Layer& layer, int l, int r, int kvh, ThreadSpace& space) {
  const PbShape& s = m.s;
  const int dim = s.head_dim, g = m.group(), t = int(b.starts[r]), len = int(b.seq_lens[r]);
  const int begin = layer.window ? std::max(0, len - layer.window) : 0, n = len - begin, n_pad = round_up(n, 16);
  const int32_t* slots = b.table + b.rows[r] * b.table_stride + begin;
  const size_t stride = size_t(s.kv_heads) * dim;
  const bf16 *keys = b.keys[l] + size_t(kvh) * dim, *values = b.values[l] + size_t(kvh) * dim;
  const float* q = m.qkv.p + size_t(t) * m.layers[0].qkv.n_pad + size_t(kvh) * g * dim;
  float* scores = space.scores.need(size_t(g) * n_pad);
  float* sums = space.sums.need(size_t(g) * dim);
#if defined(PB_AMX)
  if (g <= 16 && dim % 32 == 0) {
    // Keys are the left side, 16 tokens at a time; queries, as columns, the right one.
    bf16* right = space.q.need(size_t(dim) * 16);
    memset(right, 0, size_t(dim) * 32);
    for (int i = 0; i < g; ++i)
      for (int d = 0; d < dim; ++d) right[((d / 2) * 16 + i) * 2 + (d & 1)] = to_bf16(q[i * dim + d] * s.scale);
    bf16* copy = space.k.need(size_t(16) * dim);
    float* c = space.c.need(MB * NB);
    set_tiles(16, 0);
    const __m512i columns = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                               _mm512_set1_epi32(16));
    for (int j = 0; j < n; j += 16) {
      const int count = std::min(16, n - j);
      const bf16* left = copy;
      size_t left_stride = size_t(dim) * 2;
      bool together = count == 16;
      for (int i = 1; together && i < 16; ++i) together = slots[j + i] == slots[j] + i;
      if (together) {
        left = keys + slots[j] * stride;
        left_stride = stride * 2;
      } else {
        for (int i = 0; i < count; ++i) memcpy(copy + size_t(i) * dim, keys + slots[j + i] * stride, size_t(dim) * 2);
      }
      _tile_zero(0);
      for (int d = 0; d < dim; d += 32) {
        _tile_loadd(4, left + d, left_stride);
        _tile_loadd(6, right + size_t(d) * 16, 64);
        _tile_dpbf16ps(0, 4, 6);
      }
      _tile_stored(0, c, 64);
      for (int i = 0; i < g; ++i)
        _mm512_storeu_ps(scores + size_t(i) * n_pad + j, _mm512_i32gather_ps(columns, c + i, 4));
    }
  } else
#endif
  {
    for (int j = 0; j < n; ++j) {
      const bf16* k = keys + slots[j] * stride;
      for (int i = 0; i < g; ++i) {
        const float* head = q + i * dim;
        float sum = 0;
        for (int d = 0; d < dim; ++d) sum += head[d] * to_float(k[d]);
        scores[size_t(i) * n_pad + j] = sum * s.scale;
      }
    }
  }
  float* total = space.probs_f.need(size_t(g));
  for (int i = 0; i < g; ++i) {
    float* row = scores + size_t(i) * n_pad;
    for (int j = n; j < n_pad; ++j) row[j] = -INFINITY;
    float best = -INFINITY, sum = 0;
#ifdef PB_AVX512
    __m512 top = _mm512_set1_ps(-INFINITY), acc = _mm512_setzero_ps();
    for (int j = 0; j < n_pad; j += 16) top = _mm512_max_ps(top, _mm512_loadu_ps(row + j));
    best = _mm512_reduce_max_ps(top);
    const __m512 shift = _mm512_set1_ps(best);
    for (int j = 0; j < n_pad; j += 16) {
      __m512 e = exp512(_mm512_sub_ps(_mm512_loadu_ps(row + j), shift));
      if (j + 16 > n) e = _mm512_maskz_mov_ps(__mmask16((1u << (n - j)) - 1), e);
      _mm512_storeu_ps(row + j, e);
      acc = _mm512_add_ps(acc, e);
    }
    sum = _mm512_reduce_add_ps(acc);
#else
    for (int j = 0; j < n; ++j) best = std::max(best, row[j]);
    for (int j = 0; j < n; ++j) sum += row[j] = std::exp(row[j] - best);
#endif
    total[i] = sum;
  }
  bf16* out = m.attended.p + size_t(t) * m.layers[0].o.k_pad + size_t(kvh) * g * dim;
#ifdef PB_AVX512
  if (dim % 16 == 0) {
    for (int i0 = 0; i0 < g; i0 += 4)
      for (int d0 = 0; d0 < dim; d0 += 64) {
        const int heads = std::min(4, g - i0), parts = std::min(64, dim - d0) / 16;
        __m512 acc[4][4];
        for (auto& row : acc)
          for (auto& one : row) one = _mm512_setzero_ps();
        for (int j = 0; j < n; ++j) {
          const bf16* v = values + slots[j] * stride + d0;
          if (j + 8 < n) _mm_prefetch((const char*)(values + slots[j + 8] * stride + d0), _MM_HINT_T0);
          __m512 part[4];
          for (int p = 0; p < 4; ++p)
            if (p < parts)
              part[p] = _mm512_castsi512_ps(
                  _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(v + p * 16))), 16));
          for (int i = 0; i < 4; ++i) {
            if (i >= heads) break;
            const __m512 weight = _mm512_set1_ps(scores[size_t(i0 + i) * n_pad + j]);
            for (int p = 0; p < 4; ++p)
              if (p < parts) acc[i][p] = _mm512_fmadd_ps(weight, part[p], acc[i][p]);
          }
        }
        for (int i = 0; i < heads; ++i) {
          const __m512 factor = _mm512_set1_ps(1.0f / total[i0 + i]);
          for (int p = 0; p < parts; ++p)
            _mm256_storeu_si256((__m256i*)(out + (i0 + i) * dim + d0 + p * 16),
                                (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(acc[i][p], factor)));
        }
      }
    return;
  }
#endif
  for (int i = 0; i < g; ++i) {
    float* sum = sums + i * dim;
    memset(sum, 0, sizeof(float) * dim);
    for (int j = 0; j < n; ++j) {
      const bf16* v = values + slots[j] * stride;
      const float weight = scores[size_t(i) * n_pad + j];
      for (int d = 0; d < dim; ++d) sum[d] += weight * to_float(v[d]);
    }
    for (int d = 0; d < dim; ++d) out[i * dim + d] = to_bf16(sum[d] / total[i]);
  }
}

// The same of new tokens [first, first + count) of request r, one after the other; blockwise with tiles.
void Forward::extend(const Layer& layer, int l, int r, int kvh, int first, int count, ThreadSpace& space) {
  const PbShape& s = m.s;
  const int dim = s.head_dim, g = m.group(), t0 = int(b.starts[r]) + first;
  const int before = int(b.seq_lens[r]) - int(b.starts[r + 1] - b.starts[r]);
  const int32_t* slots = b.table + b.rows[r] * b.table_stride;
  const size_t stride = size_t(s.kv_heads) * dim;
  const bf16 *keys = b.keys[l] + size_t(kvh) * dim, *values = b.values[l] + size_t(kvh) * dim;
  const int ldq = m.layers[0].qkv.n_pad, ldo = m.layers[0].o.k_pad;
  const int rows = count * g;  // (token, head), token by token
  const int last = before + first + count - 1;  // position of the newest of these tokens
#if defined(PB_AMX)
  const int begin = layer.window ? std::max(0, before + first - layer.window + 1) : 0;
  constexpr int SB = 128;  // tokens of the context at a time
  if (rows <= MB && dim % 32 == 0) {
    bf16* q = space.q.need(size_t(MB) * dim);
    float* sums = space.sums.need(size_t(MB) * dim);
    float* scores = space.scores.need(size_t(MB) * SB);
    bf16* probs = space.probs.need(size_t(MB) * SB);
    bf16* tiles = space.k.need(size_t(SB) * dim);
    float best[MB], total[MB];
    const int m0 = std::min(rows, 16), m1 = rows - m0;
    for (int i = 0; i < rows; ++i) {
      const float* from = m.qkv.p + size_t(t0 + i / g) * ldq + size_t(kvh * g + i % g) * dim;
      for (int d = 0; d < dim; ++d) q[size_t(i) * dim + d] = to_bf16(from[d] * s.scale);
      best[i] = -INFINITY;
      total[i] = 0;
    }
    memset(sums, 0, sizeof(float) * rows * dim);
    for (int j0 = begin / SB * SB; j0 <= last; j0 += SB) {
      const int n = std::min(SB, last + 1 - j0), n32 = round_up(n, 32);
      // Keys, transposed: per 16 tokens and 32 dimensions a tile of [16 pairs of dimensions, 16 tokens].
      for (int j = 0; j < n32; j += 16)
        for (int d = 0; d < dim; d += 32) {
          alignas(64) uint32_t rows16[16][16];
          for (int i = 0; i < 16; ++i) {
            if (j0 + j + i <= last)
              memcpy(rows16[i], keys + slots[j0 + j + i] * stride + d, 64);
            else
              memset(rows16[i], 0, 64);
          }
          uint32_t* tile = reinterpret_cast<uint32_t*>(tiles + (size_t(j / 16) * (dim / 32) + d / 32) * 512);
          const __m512i at = _mm512_mullo_epi32(
              _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(16));
          for (int p = 0; p < 16; ++p)
            _mm512_store_si512(tile + p * 16, _mm512_i32gather_epi32(at, reinterpret_cast<const int*>(&rows16[0][p]), 4));
        }
      set_tiles(m0, m1);
      for (int j = 0; j < n32; j += 32) {
        for (int tile = 0; tile < 4; ++tile) {
          if (tile == 0) _tile_zero(0);
          if (tile == 1) _tile_zero(1);
          if (tile == 2) _tile_zero(2);
          if (tile == 3) _tile_zero(3);
        }
        for (int d = 0; d < dim; d += 32) {
          _tile_loadd(4, q + d, size_t(dim) * 2);
          _tile_loadd(6, tiles + (size_t(j / 16) * (dim / 32) + d / 32) * 512, 64);
          _tile_loadd(7, tiles + (size_t(j / 16 + 1) * (dim / 32) + d / 32) * 512, 64);
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 4, 7);
          if (m1) {
            _tile_loadd(5, q + size_t(16) * dim + d, size_t(dim) * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
          }
        }
        _tile_stored(0, scores + j, SB * 4);
        _tile_stored(1, scores + j + 16, SB * 4);
        if (m1) {
          _tile_stored(2, scores + size_t(16) * SB + j, SB * 4);
          _tile_stored(3, scores + size_t(16) * SB + j + 16, SB * 4);
        }
      }
      for (int i = 0; i < rows; ++i) {
        float* row = scores + size_t(i) * SB;
        const int position = before + first + i / g;
        const int stop = std::min(n, position + 1 - j0);
        const int start = layer.window ? std::max(0, position - layer.window + 1 - j0) : std::max(0, begin - j0);
        for (int j = 0; j < std::min(start, n32); ++j) row[j] = -INFINITY;
        for (int j = std::max(stop, 0); j < n32; ++j) row[j] = -INFINITY;
        __m512 top = _mm512_set1_ps(best[i]);
        for (int j = 0; j < n32; j += 16) top = _mm512_max_ps(top, _mm512_loadu_ps(row + j));
        const float peak = _mm512_reduce_max_ps(top);
        bf16* p = probs + size_t(i) * SB;
        if (peak == -INFINITY) {
          memset(p, 0, sizeof(bf16) * n32);
          continue;
        }
        const __m512 shift = _mm512_set1_ps(peak);
        __m512 acc = _mm512_setzero_ps();
        for (int j = 0; j < n32; j += 16) {
          const __m512 score = _mm512_loadu_ps(row + j);
          const __mmask16 real = _mm512_cmp_ps_mask(score, _mm512_set1_ps(-INFINITY), _CMP_NEQ_OQ);
          const __m512 e = _mm512_maskz_mov_ps(real, exp512(_mm512_sub_ps(score, shift)));
          const __m256bh rounded = _mm512_cvtneps_pbh(e);
          _mm256_storeu_si256((__m256i*)(p + j), (__m256i)rounded);
          acc = _mm512_add_ps(acc, e);
        }
        const float keep = best[i] == -INFINITY ? 0.0f : std::exp(best[i] - peak);
        total[i] = total[i] * keep + _mm512_reduce_add_ps(acc);
        best[i] = peak;
        if (keep != 1.0f) {
          const __m512 factor = _mm512_set1_ps(keep);
          for (int d = 0; d < dim; d += 16)
            _mm512_storeu_ps(sums + size_t(i) * dim + d, _mm512_mul_ps(_mm512_loadu_ps(sums + size_t(i) * dim + d), factor));
        }
      }
      // Values: per 32 tokens and 16 dimensions a tile of [16 pairs of tokens, 16 dimensions].
      for (int j = 0; j < n32; j += 2) {
        const bool one = j0 + j <= last, two = j0 + j + 1 <= last;
        const bf16* v0 = one ? values + slots[j0 + j] * stride : nullptr;
        const bf16* v1 = two ? values + slots[j0 + j + 1] * stride : nullptr;
        for (int d = 0; d < dim; d += 16) {
          const __m512i low = v0 ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(v0 + d))) : _mm512_setzero_si512();
          const __m512i high = v1 ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(v1 + d))) : _mm512_setzero_si512();
          bf16* tile = tiles + (size_t(j / 32) * (dim / 16) + d / 16) * 512;
          _mm512_store_si512(tile + (j % 32 / 2) * 32, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
      }
      for (int d = 0; d < dim; d += 32) {
        // The sums so far are where the tiles begin.
        _tile_loadd(0, sums + d, size_t(dim) * 4);
        _tile_loadd(1, sums + d + 16, size_t(dim) * 4);
        if (m1) {
          _tile_loadd(2, sums + size_t(16) * dim + d, size_t(dim) * 4);
          _tile_loadd(3, sums + size_t(16) * dim + d + 16, size_t(dim) * 4);
        }
        for (int j = 0; j < n32; j += 32) {
          _tile_loadd(4, probs + j, SB * 2);
          _tile_loadd(6, tiles + (size_t(j / 32) * (dim / 16) + d / 16) * 512, 64);
          _tile_loadd(7, tiles + (size_t(j / 32) * (dim / 16) + d / 16 + 1) * 512, 64);
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 4, 7);
          if (m1) {
            _tile_loadd(5, probs + size_t(16) * SB + j, SB * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
          }
        }
        _tile_stored(0, sums + d, size_t(dim) * 4);
        _tile_stored(1, sums + d + 16, size_t(dim) * 4);
        if (m1) {
          _tile_stored(2, sums + size_t(16) * dim + d, size_t(dim) * 4);
          _tile_stored(3, sums + size_t(16) * dim + d + 16, size_t(dim) * 4);
        }
      }
    }
    for (int i = 0; i < rows; ++i) {
      bf16* out = m.attended.p + size_t(t0 + i / g) * ldo + size_t(kvh * g + i % g) * dim;
      const __m512 factor = _mm512_set1_ps(1.0f / total[i]);
      for (int d = 0; d < dim; d += 16)
        _mm256_storeu_si256((__m256i*)(out + d), (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(
                                                     _mm512_loadu_ps(sums + size_t(i) * dim + d), factor)));
    }
    return;
  }
#endif
  float* scores = space.probs_f.need(size_t(last + 1));
  float* sums = space.sums.need(size_t(dim));
  for (int i = 0; i < rows; ++i) {
    const float* q = m.qkv.p + size_t(t0 + i / g) * ldq + size_t(kvh * g + i % g) * dim;
    const int position = before + first + i / g;
    const int start = layer.window ? std::max(0, position - layer.window + 1) : 0;
    float best = -INFINITY, total = 0;
    for (int j = start; j <= position; ++j) {
      const bf16* k = keys + slots[j] * stride;
      float sum = 0;
      for (int d = 0; d < dim; ++d) sum += q[d] * to_float(k[d]);
      scores[j] = sum * s.scale;
      best = std::max(best, scores[j]);
    }
    memset(sums, 0, sizeof(float) * dim);
    for (int j = start; j <= position; ++j) {
      const float weight = std::exp(scores[j] - best);
      const bf16* v = values + slots[j] * stride;
      total += weight;
      for (int d = 0; d < dim; ++d) sums[d] += weight * to_float(v[d]);
    }
    bf16* out = m.attended.p + size_t(t0 + i / g) * ldo + size_t(kvh * g + i % g) * dim;
    for (int d = 0; d < dim; ++d) out[d] = to_bf16(sums[d] / total);
  }
}

void Forward::run(int id) {
  const PbShape& s = m.s;
  ThreadSpace& space = m.space[id];
  float* c = space.c.need(MB * NB);
  const int tokens = b.tokens, hidden = s.hidden, ldh = m.head.k_pad, threads = m.team.size();
  const int ldq = m.layers[0].qkv.n_pad, ldo = m.layers[0].o.k_pad, lda = m.layers[0].down.k_pad;
  const bool only_decodes = tokens == b.batch;
  const int per_block = std::max(1, MB / m.group());  // tokens whose heads fill a block of rows
  std::vector<int> block_of;                          // (request, first token) pairs of extends, in pieces
  for (int r = 0; r < b.batch; ++r) {
    const int count = int(b.starts[r + 1] - b.starts[r]);
    for (int t = 0; t < count; t += count == 1 ? 1 : per_block) block_of.insert(block_of.end(), {r, t});
  }
  const int blocks = int(block_of.size()) / 2;
  const int few = std::max(1, tokens / (threads * 4));
  int counter = 0, from, to;
  {
    Shared work = share(counter, tokens, few);
    while (work.take(from, to))
      for (int t = from; t < to; ++t) {
        float* x = m.x.p + size_t(t) * hidden;
        if (b.embeds) {
          memcpy(x, b.embeds + size_t(t) * hidden, sizeof(float) * hidden);
        } else {
          const bf16* e = m.embedding + size_t(b.ids[t]) * hidden;
          for (int i = 0; i < hidden; ++i) x[i] = to_float(e[i]);
        }
        rms_norm(x, m.layers[0].norm1.data(), hidden, s.eps, m.h.p + size_t(t) * ldh);
      }
  }
  m.team.barrier();
  for (int l = 0; l < s.layers; ++l) {
    const Layer& layer = m.layers[l];
    const auto pieces = [&](const Matrix& w) { return std::max(1, w.n_pad / NB / (threads * 6)); };
    product(share(counter, layer.qkv.n_pad / NB, pieces(layer.qkv)), m.h.p, ldh, tokens, layer.qkv, c,
            [&](int r, int rows, int nb, const float* sums) {
              const float* bias = layer.qkv_bias.empty() ? nullptr : layer.qkv_bias.data() + nb * NB;
              for (int i = 0; i < rows; ++i) {
                float* out = m.qkv.p + size_t(r + i) * ldq + nb * NB;
                for (int j = 0; j < NB; ++j) out[j] = sums[i * NB + j] + (bias ? bias[j] : 0.0f);
              }
            });
    m.team.barrier();
    if (!only_decodes) {
      Shared work = share(counter, tokens, few);
      while (work.take(from, to))
        for (int t = from; t < to; ++t)
          for (int kvh = 0; kvh < s.kv_heads; ++kvh) enter_head(layer, l, t, kvh);
      m.team.barrier();
    }
    {
      // The longest contexts come last in a prompt: with small pieces nobody waits long for the others.
      Shared work = share(counter, blocks * s.kv_heads, only_decodes ? std::max(1, blocks * s.kv_heads / (threads * 8)) : 1);
      while (work.take(from, to))
        for (int i = from; i < to; ++i) {
          const int r = block_of[i / s.kv_heads * 2], first = block_of[i / s.kv_heads * 2 + 1], kvh = i % s.kv_heads;
          const int count = int(b.starts[r + 1] - b.starts[r]);
          if (count == 1) {
            if (only_decodes) enter_head(layer, l, int(b.starts[r]), kvh);
            decode(layer, l, r, kvh, space);
          } else {
            extend(layer, l, r, kvh, first, std::min(per_block, count - first), space);
          }
        }
    }
    m.team.barrier();
    const auto add = [&](const std::vector<float>& bias_of) {
      return [&](int r, int rows, int nb, const float* sums) {
        const int columns = std::min(NB, hidden - nb * NB);
        const float* bias = bias_of.empty() ? nullptr : bias_of.data() + nb * NB;
        for (int i = 0; i < rows; ++i) {
          float* out = m.x.p + size_t(r + i) * hidden + nb * NB;
          for (int j = 0; j < columns; ++j) out[j] += sums[i * NB + j] + (bias ? bias[j] : 0.0f);
        }
      };
    };
    product(share(counter, layer.o.n_pad / NB, pieces(layer.o)), m.attended.p, ldo, tokens, layer.o, c, add(layer.o_bias));
    m.team.barrier();
    rows_normed(share(counter, tokens, few), layer.norm2);
    m.team.barrier();
    product(share(counter, layer.gate_up.n_pad / NB, pieces(layer.gate_up)), m.h.p, ldh, tokens, layer.gate_up, c,
            [&](int r, int rows, int nb, const float* sums) {
              // 16 columns of the gate, then the same 16 of the other.
              const float* bias = layer.gate_up_bias.empty() ? nullptr : layer.gate_up_bias.data() + nb * NB;
              const int columns = std::min(16, s.inter - nb * 16);
              for (int i = 0; i < rows; ++i) {
                bf16* out = m.act.p + size_t(r + i) * lda + nb * 16;
                const float* row = sums + i * NB;
#ifdef PB_AVX512
                if (s.act == SILU && columns == 16 && !bias) {
                  const __m512 gate = _mm512_loadu_ps(row), up = _mm512_loadu_ps(row + 16), one = _mm512_set1_ps(1.0f);
                  // x * sigmoid(x), with e^-|x| so that nothing overflows.
                  const __m512 e = exp512(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(gate)));
                  const __mmask16 negative = _mm512_cmp_ps_mask(gate, _mm512_setzero_ps(), _CMP_LT_OQ);
                  const __m512 sigmoid = _mm512_div_ps(_mm512_mask_mov_ps(one, negative, e), _mm512_add_ps(one, e));
                  const __m512 y = _mm512_mul_ps(_mm512_mul_ps(gate, sigmoid), up);
                  _mm256_storeu_si256((__m256i*)out, (__m256i)_mm512_cvtneps_pbh(y));
                  continue;
                }
#endif
                for (int j = 0; j < columns; ++j) {
                  const float gate = row[j] + (bias ? bias[j] : 0.0f), up = row[16 + j] + (bias ? bias[16 + j] : 0.0f);
                  out[j] = to_bf16(activate(gate, s.act) * up);
                }
              }
            });
    m.team.barrier();
    product(share(counter, layer.down.n_pad / NB, pieces(layer.down)), m.act.p, lda, tokens, layer.down, c,
            add(layer.down_bias));
    m.team.barrier();
    if (l + 1 < s.layers) {
      rows_normed(share(counter, tokens, few), m.layers[l + 1].norm1);
      m.team.barrier();
    }
  }
  if (b.hidden) {
    Shared work = share(counter, b.hidden_count, 4);
    while (work.take(from, to))
      for (int i = from; i < to; ++i) {
        const float* x = m.x.p + size_t(b.hidden_rows[i]) * hidden;
        float sum = 0;
        for (int j = 0; j < hidden; ++j) sum += x[j] * x[j];
        const float scale = 1.0f / std::sqrt(sum / hidden + s.eps);
        for (int j = 0; j < hidden; ++j) b.hidden[size_t(i) * hidden + j] = x[j] * scale * m.final_norm[j];
      }
  }
  if (b.logits || b.greedy) {
    {
      // Sampled rows move to the front of `h`, which nobody reads any more.
      Shared work = share(counter, b.sampled, 4);
      while (work.take(from, to))
        for (int i = from; i < to; ++i)
          rms_norm(m.x.p + size_t(b.sample_rows ? b.sample_rows[i] : i) * hidden, m.final_norm.data(), hidden, s.eps,
                   m.h.p + size_t(i) * ldh);
    }
    Best* best = space.best.need(size_t(b.sampled));
    for (int i = 0; i < b.sampled; ++i) best[i] = {-INFINITY, INT32_MAX};
    m.team.barrier();
    product(share(counter, m.head.n_pad / NB, 8), m.h.p, ldh, b.sampled, m.head, c,
            [&](int r, int rows, int nb, const float* sums) {
              const int columns = std::min(NB, s.vocab - nb * NB);
              for (int i = 0; i < rows; ++i) {
                const float* row = sums + i * NB;
                if (b.logits) memcpy(b.logits + size_t(r + i) * s.vocab + nb * NB, row, sizeof(float) * columns);
                if (!b.greedy) continue;
                Best& found = best[r + i];
                int at = 0;
                for (int j = 1; j < columns; ++j) at = row[j] > row[at] ? j : at;
                const int32_t id = nb * NB + at;
                // Blocks come in any order: of equal ones the first token wins. A NaN is nobody's largest.
                if (row[at] > found.value || (row[at] == found.value && id < found.id)) found = {row[at], id};
              }
            });
    if (b.greedy) {
      m.team.barrier();
      if (id == 0)
        for (int i = 0; i < b.sampled; ++i) {
          Best found{-INFINITY, INT32_MAX};
          for (auto& one : m.space) {
            const Best& other = one.best.p[i];
            if (other.value > found.value || (other.value == found.value && other.id < found.id)) found = other;
          }
          b.greedy[i] = found.id == INT32_MAX ? -1 : found.id;
        }
    }
  }
  release_tiles();
}

// Logits float [n, vocab] of hidden states float [n, hidden] as `hidden` of a batch has them.
void project(Model& m, const float* hidden, int n, float* logits, int id) {
  ThreadSpace& space = m.space[id];
  float* c = space.c.need(MB * NB);
  const int ldh = m.head.k_pad;
  Shared rows{m.counters[0], n, 4};
  int from, to;
  while (rows.take(from, to))
    for (int i = from; i < to; ++i) floats_to_bf16(hidden + size_t(i) * m.s.hidden, m.h.p + size_t(i) * ldh, m.s.hidden);
  m.team.barrier();
  product(Shared{m.counters[1], m.head.n_pad / NB, 8}, m.h.p, ldh, n, m.head, c,
          [&](int r, int count, int nb, const float* sums) {
            const int columns = std::min(NB, m.s.vocab - nb * NB);
            for (int i = 0; i < count; ++i)
              memcpy(logits + size_t(r + i) * m.s.vocab + nb * NB, sums + i * NB, sizeof(float) * columns);
          });
  release_tiles();
}

void keep(std::vector<float>& to, const float* from, int n, int n_pad) {
  if (!from) return;
  to.assign(n_pad, 0.0f);
  std::copy(from, from + n, to.begin());
}

}  // namespace

extern "C" {

// 0, or an errno: the kernel must allow a process to use tiles.
int pb_prepare() {
#ifdef PB_AMX
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)) return errno;
#endif
  return 0;
}

void* pb_create(const PbShape* shape) {
  try {
    return new Model(*shape);
  } catch (...) {
    return nullptr;
  }
}

void pb_destroy(void* handle) { delete static_cast<Model*>(handle); }

// Copies, packed. 0, or 1 where memory does not suffice.
int pb_set_layer(void* handle, int index, const PbLayerWeights* w) {
  try {
    Model& m = *static_cast<Model*>(handle);
    const PbShape& s = m.s;
    Layer& layer = m.layers[index];
    const int hidden = s.hidden, q = m.q_size(), kv = m.kv_size();
    std::vector<const bf16*> rows;
    for (int i = 0; i < q; ++i) rows.push_back(w->q + size_t(i) * hidden);
    for (int i = 0; i < kv; ++i) rows.push_back(w->k + size_t(i) * hidden);
    for (int i = 0; i < kv; ++i) rows.push_back(w->v + size_t(i) * hidden);
    layer.qkv.pack(rows.data(), q + 2 * kv, hidden);
    rows.clear();
    for (int i = 0; i < hidden; ++i) rows.push_back(w->o + size_t(i) * q);
    layer.o.pack(rows.data(), hidden, q);
    rows.clear();
    const int inter = s.inter, inter16 = round_up(inter, 16);
    for (int i = 0; i < inter16; i += 16)
      for (const bf16* one : {w->gate, w->up})
        for (int j = 0; j < 16; ++j) rows.push_back(i + j < inter ? one + size_t(i + j) * hidden : nullptr);
    layer.gate_up.pack(rows.data(), int(rows.size()), hidden);
    rows.clear();
    for (int i = 0; i < hidden; ++i) rows.push_back(w->down + size_t(i) * inter);
    layer.down.pack(rows.data(), hidden, inter);
    keep(layer.norm1, w->norm1, hidden, hidden);
    keep(layer.norm2, w->norm2, hidden, hidden);
    keep(layer.q_norm, w->q_norm, s.head_dim, s.head_dim);
    keep(layer.k_norm, w->k_norm, s.head_dim, s.head_dim);
    keep(layer.o_bias, w->o_bias, hidden, layer.o.n_pad);
    keep(layer.down_bias, w->down_bias, hidden, layer.down.n_pad);
    if (w->q_bias) {
      layer.qkv_bias.assign(layer.qkv.n_pad, 0.0f);
      std::copy(w->q_bias, w->q_bias + q, layer.qkv_bias.begin());
      std::copy(w->k_bias, w->k_bias + kv, layer.qkv_bias.begin() + q);
      std::copy(w->v_bias, w->v_bias + kv, layer.qkv_bias.begin() + q + kv);
    }
    if (w->gate_bias) {
      layer.gate_up_bias.assign(layer.gate_up.n_pad, 0.0f);
      for (int i = 0; i < inter; ++i) {
        layer.gate_up_bias[i / 16 * 32 + i % 16] = w->gate_bias[i];
        layer.gate_up_bias[i / 16 * 32 + 16 + i % 16] = w->up_bias[i];
      }
    }
    layer.window = w->window;
    return 0;
  } catch (...) {
    return 1;
  }
}

// `embedding` [vocab, hidden] is not copied and must live as long as the model; `head` is packed.
int pb_set_ends(void* handle, const bf16* embedding, const bf16* head, const float* final_norm) {
  try {
    Model& m = *static_cast<Model*>(handle);
    m.embedding = embedding;
    std::vector<const bf16*> rows;
    for (int i = 0; i < m.s.vocab; ++i) rows.push_back(head + size_t(i) * m.s.hidden);
    m.head.pack(rows.data(), m.s.vocab, m.s.hidden);
    keep(m.final_norm, final_norm, m.s.hidden, m.s.hidden);
    return 0;
  } catch (...) {
    return 1;
  }
}

// One forward pass. 0, or 1 where memory does not suffice.
int pb_forward(void* handle, const PbBatch* batch) {
  Model& m = *static_cast<Model*>(handle);
  try {
    const size_t rows = size_t(round_up(batch->tokens, MB)), sampled = size_t(round_up(std::max(1, batch->sampled), MB));
    m.x.need(rows * m.s.hidden);
    m.h.need(std::max(rows, sampled) * m.head.k_pad);
    m.qkv.need(rows * m.layers[0].qkv.n_pad);
    m.attended.need(rows * m.layers[0].o.k_pad);
    m.act.need(rows * m.layers[0].down.k_pad);
    for (auto& one : m.counters) one.store(0, std::memory_order_relaxed);
    m.team.run([&](int id) {
      Forward forward{m, *batch};
      forward.run(id);
    });
    return 0;
  } catch (...) {
    return 1;
  }
}

// See `project`. 0, or 1 where memory does not suffice.
int pb_project(void* handle, const float* hidden, int n, float* logits) {
  Model& m = *static_cast<Model*>(handle);
  try {
    m.h.need(size_t(round_up(n, MB)) * m.head.k_pad);
    for (auto& one : m.counters) one.store(0, std::memory_order_relaxed);
    m.team.run([&](int id) { project(m, hidden, n, logits, id); });
    return 0;
  } catch (...) {
    return 1;
  }
}

}  // extern "C"
