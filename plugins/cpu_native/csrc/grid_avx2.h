// See grid.h. No grid is found: formats for them take AVX-512 to unpack.
#pragma once

#include "grid.h"

namespace {

inline bool on_16(const bf16*, OnGrid&) { return false; }
inline bool on_255(const bf16*, OnGrid&) { return false; }

}  // namespace
