// Sums of products of a few rows with tiles, in registers: what there is where there is no AMX.
#pragma once

#include <cstddef>

#include "instruction_set.h"
#include "vectors.h"

namespace {

// Steps that are unpacked and then multiplied with: they are still in the first level's cache, and sums, which pass
// through memory in between, do so seldom.
constexpr int UNPACKED = 8;

// Where rows of 32 columns each are, how far a row is from the next, and the next 32 columns of them: in numbers.
struct Rows {
  const bf16* data;
  size_t row, step;
};

// Tiles of 16 pairs x 16 columns: the first, how far the one with the next 16 columns is, and the one with the next
// pairs.
struct Tiles {
  const bf16* data;
  size_t apart, step;
};

}  // namespace

#ifdef PB_AVX512
#include "sums_avx512.h"
#else
#include "sums_avx2.h"
#endif
