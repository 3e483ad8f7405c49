// Asking memory for what comes next.
#pragma once

#include <cstddef>
#include <cstdint>

#include <immintrin.h>

#include "numbers.h"

namespace {

// How far ahead weights are asked for, in bytes.
constexpr int AHEAD = 2048;

// The lines of SIZE bytes further on, one after the other while `rows` rows are worked on: memory is kept busy all the
// time.
template <size_t SIZE, int ROWS>
inline void ask_ahead(const uint8_t* p, int row) {
  constexpr int lines = int((SIZE + 63) / 64);
  const int line = row * lines / ROWS;
  if ((row + 1) * lines / ROWS > line) _mm_prefetch((const char*)p + AHEAD + line * 64, _MM_HINT_T0);
}

// Asks memory for the keys and values of the next bite while this one is worked on, line by line in the order in which
// they lie, a line of both in turn. A core waits for a dozen lines or so at a time, whatever asked for them; lines that
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

}  // namespace
