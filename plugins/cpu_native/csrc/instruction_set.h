// What the library is compiled for: PB_AMX (tiles; with AVX-512 and its bf16 dot product), PB_AVX512 (the latter
// alone), or neither, which is AVX2.
//
// An instruction set is a back end in files of its own. `x_amx.h`, `x_avx512.h` and `x_avx2.h` offer the same
// functions, and `x.h` includes the one that counts: nothing else asks for the instruction set. Where AMX has no file
// of its own, AVX-512's is used.
#pragma once

#if defined(PB_AMX)
#define PB_AVX512 1
#endif
