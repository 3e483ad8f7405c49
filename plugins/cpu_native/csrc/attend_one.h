// Attention of one query per head.
//
// Keys and values are read where they are, all KV heads of a slot together, and each once. Scores are [keys][16
// columns], a column per query head: with tiles, keys are the left side of a product whose right side is made of the
// queries, and the softmax of 16 heads needs neither a transposition nor a sum across lanes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "instruction_set.h"
#include "memory.h"
#include "prefetch.h"
#include "vectors.h"

namespace {

constexpr int COLUMNS = 16;
constexpr int BITE = 16;  // keys at a time: few, so that asking for the next ones is spread over all there is to do

// Where the keys of KV heads are: those of slot 0 and the first head; and their sizes.
struct HeadKeys {
  const bf16* first;
  size_t stride;   // from slot to slot
  int dim, dp, g;  // dimensions, the same padded, and query heads per KV head
};

}  // namespace

#ifdef PB_AVX512
#include "attend_one_avx512.h"
#else
#include "attend_one_avx2.h"
#endif

#if defined(PB_AMX)
#include "score_one_amx.h"
#elif defined(PB_AVX512)
#include "score_one_avx512.h"
#else
#include "score_one_avx2.h"
#endif
