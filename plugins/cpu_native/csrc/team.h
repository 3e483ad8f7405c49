// Threads that run one program together, and the work that they share.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include <immintrin.h>
#include <sched.h>

namespace {

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
    try {
      for (int i = 1; i < n; ++i) threads_.emplace_back([this, i] { serve(i); });
    } catch (...) {
      end();
      throw;
    }
  }
  ~Team() { end(); }
  int size() const { return n_; }

  template <class F>
  void run(F&& f) {
    // An exception could not be told to the threads that wait at a barrier: it ends the process.
    call_ = [](void* arg, int id) noexcept { (*static_cast<std::remove_reference_t<F>*>(arg))(id); };
    arg_ = &f;
    left_.store(n_ - 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      epoch_.fetch_add(1, std::memory_order_release);
    }
    if (n_ > 1) wake_.notify_all();
    call_(arg_, 0);
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
  void end() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      epoch_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto& t : threads_) t.join();
  }

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

// Who has taken how much of each thread's part of some work; zero where it begins.
using Taken = std::atomic<int>*;

// One run of work that threads share: `total` items in parts of `part`, one for each thread, or a single part for all.
// `take` gives a thread `first` items of its own part, so that it can ask memory for them before the others are done with
// what comes before; then `piece` at a time; then pieces of the other parts: a thread whose core is wanted elsewhere does
// less.
struct Shared {
  Taken taken;
  int total, part, piece, threads, id, first;
  int tried = 0;  // parts that are empty

  bool started = false;
  bool take(int& from, int& to) {
    const int parts = part < total ? threads : 1;
    if (!started && first && parts > 1) {
      started = true;
      from = id * part, to = std::min({total, from + first, (id + 1) * part});
      if (from < to) return true;
    }
    for (; tried < parts; ++tried) {
      const int which = (id + tried) % parts, end = std::min(total, (which + 1) * part);
      if (which * part >= end) continue;
      from = which * part + (parts > 1 ? first : 0) + taken[which].fetch_add(piece, std::memory_order_relaxed);
      if (from >= end) continue;
      to = std::min(end, from + piece);
      return true;
    }
    return false;
  }
};

// Items of shared work one by one, -1 behind the last one.
struct OneByOne {
  Shared& work;
  int at = 0, end = 0;
  int next() { return at < end || work.take(at, end) ? at++ : -1; }
};

}  // namespace
