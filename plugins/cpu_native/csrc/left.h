// The left side of products.
#pragma once

#include <algorithm>
#include <cstring>

#include "formats.h"
#include "numbers.h"

namespace {

// The left side of products as tiles read it: for every 32 rows (or all, where there are fewer) and step of 32 columns
// the rows' parts of it, one after another. Columns up to a multiple of 32 have to be zero.
struct Left {
  bf16* data;
  int steps, height;  // steps of a row; rows together

  Left(bf16* data, int columns, int rows) : data(data), steps((columns + KB - 1) / KB), height(std::min(rows, MB)) {}
  static size_t size(int columns, int rows) { return size_t(round_up(columns, KB)) * round_up(rows, MB); }

  struct Row {
    bf16* data;
    size_t step;
    bf16* at(int column) const { return data + column / KB * step + column % KB; }
    void zero_from(int column) const {
      if (column % KB) memset(at(column), 0, (KB - column % KB) * sizeof(bf16));
    }
  };
  Row row(int i) const { return {rows(i / MB * MB) + i % MB * KB, size_t(height) * KB}; }
  // From row i on, a multiple of 32; the next step is `height` * 32 numbers further.
  bf16* rows(int i) const { return data + size_t(i) * steps * KB; }
  // The same without what comes before row i.
  Left from(int i) const {
    Left made = *this;
    made.data = rows(i);
    return made;
  }
};

}  // namespace
