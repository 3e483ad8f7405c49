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

// How many items of each thread's part have been taken; zero where some work begins.
using Taken = std::atomic<int>*;

// One run of work that threads share.
struct Shared {
  // `total` items that free threads take from the front, `piece` at a time.
  static Shared queue(Taken taken, int total, int piece, int id) {
    return Shared{taken, total, std::max(1, total), 0, std::max(1, piece), 1, id};
  }
  // `part` items for each thread, `threads * part` or fewer in all. A thread begins with the first `own` of its part,
  // which no other takes from it, so that it can ask memory for them before the others are done with what comes before;
  // the rest of all parts goes to threads that are free, its own before others': a thread whose core is wanted
  // elsewhere does less.
  static Shared parts(Taken taken, int total, int part, int own, int piece, int threads, int id) {
    return Shared{taken, total, std::max(1, part), own, std::max(1, piece), threads, id};
  }

  // The items [from, to), which no one shares.
  static Shared only(int from, int to) { return Shared{nullptr, to, from, to - from, 1, 0, 1}; }

  bool take(int& from, int& to) {
    if (!begun && own > 0) {
      begun = true;
      from = id * part, to = std::min(total, from + own);
      if (from < to) return true;
    }
    for (; tried < count; ++tried) {
      const int which = (id + tried) % count, end = std::min(total, (which + 1) * part);
      if (which * part + own >= end) continue;
      from = which * part + own + taken[which].fetch_add(piece, std::memory_order_relaxed);
      if (from >= end) continue;
      to = std::min(end, from + piece);
      return true;
    }
    return false;
  }

  Taken taken;
  int total, part, own, piece, count, id;  // `count` parts
  int tried = 0;                           // parts of which nothing is left
  bool begun = false;
};

// Items of shared work one by one, -1 behind the last one.
struct OneByOne {
  Shared& work;
  int at = 0, end = 0;
  int next() { return at < end || work.take(at, end) ? at++ : -1; }
};

}  // namespace
