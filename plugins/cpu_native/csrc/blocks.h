// Blocks of sums: up to 32 rows by 32 columns.
#pragma once

#include "vectors.h"

#ifdef PB_AMX
#include "blocks_amx.h"
#else
#include "blocks_vectors.h"
#endif
