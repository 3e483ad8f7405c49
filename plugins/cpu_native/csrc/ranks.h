// Ranks: processes that compute one model together, each a share of every matrix. Their partial sums meet in memory
// that all of them map.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <ctime>

#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// The memory has a line for each rank, then two slots for each, which are used in turn. For a sum each rank writes its
// own slot, counts in its line, waits until the others have counted as far, and adds all slots in the order of ranks,
// so that all ranks get the same bits. A rank writes its slot for sum n once all have counted for sum n - 1. By then
// all have read the slots of sum n - 2, which lie in the same place.
class Ranks {
 public:
  static constexpr int ROWS = 256;  // tokens of a slot

  Ranks(int size, int own, int hidden) : size_(size), own_(own), hidden_(hidden) {}
  int size() const { return size_; }
  int64_t bytes() const { return int64_t(size_) * int64_t(sizeof(Line) + 2 * slot_size() * sizeof(float)); }

  // `lost` is asked from time to time by a thread that has waited for so many seconds. Not 0: it is of no use to wait
  // any longer.
  void join(uint8_t* memory, int32_t (*lost)(double)) {
    lines_ = reinterpret_cast<Line*>(memory);
    slots_ = reinterpret_cast<float*>(memory + size_ * sizeof(Line));
    ask_ = lost;
  }

  // Whether it was of no use to wait: from then on no thread waits, and sums have no meaning.
  bool lost() const { return lost_.load(std::memory_order_relaxed); }

  // Number of the next sum. Threads count on by themselves in a pass.
  uint32_t next = 1;

  float* own_slot(uint32_t sum) const { return slot(sum, own_); }

  // This rank's slot is written: by one thread, after all have met.
  void tell(uint32_t sum) {
    if (lost()) return;
    lines_[own_].count.store(sum);
    for (int r = 0; r < size_; ++r)
      if (lines_[r].sleepers.load()) {
        syscall(SYS_futex, &lines_[own_].count, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
        return;
      }
  }

  // All slots are written, or a rank is lost. One thread `asks`.
  void wait(uint32_t sum, bool asks) {
    for (int r = 0; r < size_; ++r)
      for (int looks = 0; behind(r, sum) && !lost();) {
        if (++looks < SPINS)
          _mm_pause();
        else if (looks < SPINS + YIELDS)
          sched_yield();  // the other rank may need this core
        else
          sleep(r, sum, asks);
      }
  }

  // x[hidden] += the sum of row `row` of all slots.
  void add(uint32_t sum, int row, float* x) const {
    constexpr int SOME = 64;
    for (int from = 0; from < hidden_; from += SOME) {
      const int n = std::min(SOME, hidden_ - from);
      const size_t at = size_t(row) * hidden_ + from;
      float total[SOME];
      memcpy(total, slot(sum, 0) + at, n * sizeof(float));
      for (int r = 1; r < size_; ++r) {
        const float* other = slot(sum, r) + at;
        for (int i = 0; i < n; ++i) total[i] += other[i];
      }
      for (int i = 0; i < n; ++i) x[from + i] += total[i];
    }
  }

 private:
  struct alignas(64) Line {
    std::atomic<uint32_t> count, sleepers;
  };
  static_assert(sizeof(Line) == 64 && std::atomic<uint32_t>::is_always_lock_free, "it is memory of several processes");

  static constexpr int SPINS = 1000, YIELDS = 50;  // about 50 µs, and as long again if the core is idle
  static constexpr long NAP = 2'000'000;           // ns
  static constexpr double ASK = 0.2;               // seconds

  size_t slot_size() const { return size_t(ROWS) * hidden_; }
  float* slot(uint32_t sum, int rank) const { return slots_ + (size_t(sum % 2) * size_ + rank) * slot_size(); }
  bool behind(int rank, uint32_t sum) const {
    return int32_t(lines_[rank].count.load(std::memory_order_acquire) - sum) < 0;
  }

  // Until that rank has counted or `lost` says so. No wake-up is missed: a rank counts and then looks for sleepers, and
  // this one says that it sleeps and then looks at the count, as the kernel does once more.
  void sleep(int rank, uint32_t sum, bool asks) {
    using Clock = std::chrono::steady_clock;
    const auto began = Clock::now();
    auto asked = began;
    lines_[own_].sleepers.fetch_add(1);
    for (uint32_t seen; int32_t((seen = lines_[rank].count.load()) - sum) < 0 && !lost();) {
      const timespec nap{0, NAP};
      syscall(SYS_futex, &lines_[rank].count, FUTEX_WAIT, seen, &nap, nullptr, 0);
      const auto now = Clock::now();
      if (!asks || std::chrono::duration<double>(now - asked).count() < ASK) continue;
      asked = now;
      if (ask_(std::chrono::duration<double>(now - began).count()) && behind(rank, sum)) lost_.store(true);
    }
    lines_[own_].sleepers.fetch_sub(1);
  }

  const int size_, own_, hidden_;
  Line* lines_ = nullptr;
  float* slots_ = nullptr;
  int32_t (*ask_)(double) = nullptr;
  std::atomic<bool> lost_{false};
};

}  // namespace
