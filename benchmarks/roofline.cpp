// How fast this machine reads memory and multiplies, in a plain loop of its own. Built and run by roofline.py.
//
//   roofline read MEGABYTES THREADS HUGE SECONDS   GB/s, best pass, and how much memory had huge pages
//   roofline multiply THREADS SECONDS              1e9 operations/s, best pass, by the widest unit it was compiled for
//
// Of many passes the best counts: another program on the machine can only slow one down.
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>
#if defined(__AVX2__) || defined(__AMX_TILE__)
#include <immintrin.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;
typedef uint64_t Wide __attribute__((vector_size(64)));  // what the compiler makes of it: one, two or four registers

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

void pin(int thread) {
  cpu_set_t allowed, one;
  sched_getaffinity(0, sizeof allowed, &allowed);
  for (int cpu = 0, seen = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed) || seen++ != thread) continue;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    pthread_setaffinity_np(pthread_self(), sizeof one, &one);
    return;
  }
}

// Threads that wait for each other before and after each pass; who waits yields, for another may be in need of the
// core.
struct Gate {
  std::atomic<int> arrived{0}, round{0};
  int threads;
  explicit Gate(int n) : threads(n) {}
  void wait() {
    int now = round.load();
    if (arrived.fetch_add(1) + 1 == threads) {
      arrived = 0;
      round.store(now + 1);
    } else {
      while (round.load() == now) sched_yield();
    }
  }
};

// The best pass of `work`, which runs in `threads` threads; it is given the thread's number.
template <class Setup, class Work>
double best_pass(int threads, double limit, Setup setup, Work work) {
  Gate gate(threads);
  std::atomic<bool> more{true};
  double best = 1e9;
  auto run = [&](int thread) {
    pin(thread);
    setup(thread);
    auto began = Clock::now();
    for (int pass = 0;; ++pass) {
      gate.wait();
      auto start = Clock::now();
      work(thread);
      gate.wait();
      if (thread == 0) {
        if (pass) best = std::min(best, seconds_since(start));  // the first one is the warm-up
        if (seconds_since(began) > limit && pass > 2) more = false;
      }
      gate.wait();
      if (!more) return;
    }
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(run, thread);
  run(0);
  for (auto& one : others) one.join();
  return best;
}

std::atomic<uint64_t> sink;

void read_all(const char* from, size_t bytes) {
  const Wide* at = reinterpret_cast<const Wide*>(from);
  Wide a{}, b{}, c{}, d{};
  for (size_t i = 0; i + 4 <= bytes / sizeof(Wide); i += 4) {
    __builtin_prefetch(at + i + 64);
    __builtin_prefetch(at + i + 65);
    __builtin_prefetch(at + i + 66);
    __builtin_prefetch(at + i + 67);
    a += at[i], b += at[i + 1], c += at[i + 2], d += at[i + 3];
  }
  a += b + c + d;
  sink += a[0] ^ a[7];
}

double megabytes_in_huge_pages() {
  FILE* file = fopen("/proc/self/smaps_rollup", "r");
  char line[256];
  double kilobytes = 0;
  while (file && fgets(line, sizeof line, file))
    if (!strncmp(line, "AnonHugePages:", 14)) kilobytes = atof(line + 14);
  if (file) fclose(file);
  return kilobytes / 1024;
}

int read_memory(double megabytes, int threads, bool huge, double limit) {
  const size_t page = 2 << 20, share = (size_t(megabytes * 1048576 / threads) + page - 1) / page * page;
  const size_t bytes = share * threads;
  char* map =
      static_cast<char*>(mmap(nullptr, bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (map == MAP_FAILED) return fprintf(stderr, "no memory\n"), 1;
  char* data = map + (page - reinterpret_cast<uintptr_t>(map) % page) % page;
  madvise(data, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  double best = best_pass(
      threads, limit, [&](int thread) { memset(data + thread * share, 1, share); },
      [&](int thread) { read_all(data + thread * share, share); });
  printf("%.3f %.0f\n", bytes / best / 1e9, megabytes_in_huge_pages());
  return 0;
}

const int ROUNDS = 200000;

#if defined(__AMX_BF16__)
const char* UNIT = "AMX bf16";
const double PER_ROUND = 4.0 * 2 * 16 * 16 * 32;
void prepare(int) {
  static_assert(sizeof(long) == 8, "Linux on x86-64");
  if (syscall(SYS_arch_prctl, 0x1023, 18)) exit((fprintf(stderr, "the kernel gives no AMX\n"), 1));
  alignas(64) struct {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t columns[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  // GCC takes it that only the first eight bytes are read, and drops the others unless they are seen to be used.
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}
void multiply(int) {
  // Numbers as weights are, loaded as a product has to: with zeros, or what is there already, the clock stays higher.
  alignas(64) uint16_t numbers[4][512];
  uint32_t draw = 1;
  for (auto& tile : numbers)
    for (auto& one : tile) {
      draw = draw * 1664525u + 1013904223u;
      one = uint16_t((draw >> 16 & 0x80ff) | 0x3c00);
    }
  asm volatile("" ::"r"(numbers) : "memory");
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int i = 0; i < ROUNDS; ++i) {
    _tile_loadd(4, numbers[0], 64);
    _tile_loadd(6, numbers[1], 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, numbers[2], 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, numbers[3], 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}
#else
#if defined(__AVX512BF16__)
const char* UNIT = "AVX-512 bf16";
typedef __m512 Sum;
const double OPERATIONS = 2 * 32;
static inline Sum step(Sum sum, Sum x) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)x); }
#elif defined(__AVX512F__)
const char* UNIT = "AVX-512 FMA";
typedef __m512 Sum;
const double OPERATIONS = 2 * 16;
static inline Sum step(Sum sum, Sum x) { return _mm512_fmadd_ps(x, x, sum); }
#elif defined(__FMA__)
const char* UNIT = "AVX2 FMA";
typedef __m256 Sum;
const double OPERATIONS = 2 * 8;
static inline Sum step(Sum sum, Sum x) { return _mm256_fmadd_ps(x, x, sum); }
#else
const char* UNIT = "plain";
typedef float Sum __attribute__((vector_size(16)));
const double OPERATIONS = 2 * 4;
static inline Sum step(Sum sum, Sum x) { return sum * x + x; }
#endif
const double PER_ROUND = 12 * OPERATIONS;
void prepare(int) {}
void multiply(int) {
  Sum sums[12] = {}, x{};
  asm volatile("" : "+x"(x));
  for (int i = 0; i < ROUNDS; ++i)
    for (auto& one : sums) one = step(one, x);
  for (auto& one : sums) asm volatile("" ::"x"(one));
}
#endif

}  // namespace

int main(int count, char** words) {
  std::string what = count > 1 ? words[1] : "";
  if (what == "read" && count == 6) return read_memory(atof(words[2]), atoi(words[3]), atoi(words[4]), atof(words[5]));
  if (what == "multiply" && count == 4) {
    int threads = atoi(words[2]);
    double best = best_pass(threads, atof(words[3]), prepare, multiply);
    printf("%.1f %s\n", threads * ROUNDS * PER_ROUND / best / 1e9, UNIT);
    return 0;
  }
  fprintf(stderr, "roofline read MEGABYTES THREADS HUGE SECONDS | roofline multiply THREADS SECONDS\n");
  return 2;
}
