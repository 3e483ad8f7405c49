// Memory that grows, and memory for weights.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include <sys/mman.h>

namespace {

template <class T>
T* aligned(size_t n) {
  void* p = std::aligned_alloc(64, (n * sizeof(T) + 63) / 64 * 64);
  if (!p) throw std::bad_alloc();
  return static_cast<T*>(p);
}

template <class T>
struct Buffer {
  T* data = nullptr;
  size_t size = 0;

  // At least `wanted` numbers; where there were fewer, all are new, and zero.
  T* need(size_t wanted) {
    if (wanted > size) {
      free(data);
      data = nullptr;
      size = 0;
      data = aligned<T>(wanted);
      memset(static_cast<void*>(data), 0, wanted * sizeof(T));
      size = wanted;
    }
    return data;
  }
  ~Buffer() { free(data); }
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

}  // namespace
