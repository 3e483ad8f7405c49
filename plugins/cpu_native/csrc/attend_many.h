// Attention of blocks of queries with blocks of keys.
//
// Heads are padded with zeros to `dp`, a multiple of 32. Keys are packed like weights: per 16 keys and 32 dimensions a
// tile of 16 pairs of dimensions x 16 keys x 2; values per 32 keys and 16 dimensions one of 16 pairs of keys x 16
// dimensions x 2. Up to the next multiple of 32 keys there are zeros: nothing is read that is not the request's own.
#pragma once

#include "instruction_set.h"
#include "vectors.h"

namespace {

constexpr int KEYS = 128;  // at a time: their scores and weights, and 32 queries, stay in the first level's cache

}  // namespace

#ifdef PB_AVX512
#include "attend_many_avx512.h"
#else
#include "attend_many_avx2.h"
#endif

#ifdef PB_AMX
#include "attend_blocks_amx.h"
#else
#include "attend_blocks_vectors.h"
#endif
