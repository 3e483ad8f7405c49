// Blocks of products of up to 32 rows, whose weights come from memory and are used once.
#pragma once

#include <cstdint>

#include "blocks.h"
#include "instruction_set.h"
#include "matrix.h"

namespace {

// c[m rows][NB] += what of block nb is kept apart, times a: for the few rows whose weights are nowhere unpacked.
inline void add_rest(const Matrix& w, const Left& a, int m, int nb, float* c) {
  for (int i = w.rest_from[nb]; i < w.rest_from[nb + 1]; ++i) {
    const Matrix::Rest& one = w.rest[i];
    const bf16* from = a.row(0).at(one.column);
    for (int r = 0; r < m; ++r) c[r * NB + one.row] += to_float(from[r * KB]) * to_float(one.value);
  }
}

}  // namespace

#if defined(PB_AMX)
#include "few_rows_amx.h"
#elif defined(PB_AVX512)
#include "few_rows_avx512.h"
#else
#include "few_rows_avx2.h"
#endif
