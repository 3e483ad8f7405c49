// Rows of float32 to bf16, by the widest registers there are; with AVX-512, what is built of such registers besides.
#pragma once

#include "instruction_set.h"

#ifdef PB_AVX512
#include "vectors_avx512.h"
#else
#include "vectors_avx2.h"
#endif
