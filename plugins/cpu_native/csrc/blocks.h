// Blocks of sums: up to 32 rows by 32 columns.
#pragma once

#include "instruction_set.h"
#include "vectors.h"

#ifdef PB_AMX
#include "blocks_amx.h"
#else
#include "blocks_vectors.h"
#endif
