// Rows of float32: conversions, norms and activations, by the widest registers there are.
//
// An instruction set is a back end in files of its own: `x_amx.h`, `x_avx512.h` and `x_avx2.h` offer the same
// functions, and `x.h` includes the one that the library is compiled for. What AMX and AVX-512 share is in
// `x_avx512.h`.
#pragma once

#include "numbers.h"

#if defined(PB_AMX)
#define PB_AVX512 1
#endif

#ifdef PB_AVX512
#include "vectors_avx512.h"
#else
#include "vectors_avx2.h"
#endif
