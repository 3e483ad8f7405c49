// Formats of packed weights.
//
// At small batches a step takes as long as reading the weights does, so what counts is how few bytes they are and that
// they are asked for in time. Five formats:
//
// - BF16: as they are.
// - BF12: the same numbers in 12 bits. Nearly all exponents of a matrix lie in a few neighbouring binades, so the upper
//   byte of a number (sign and the upper seven bits of the exponent) becomes a sign and one of eight values of a table;
//   the lower byte stays.
// - NIBBLES: 4 bits, with a scale and a least number for every 32 columns of a row: the same numbers, where they lie on
//   such a grid.
// - INT4: 4 bits, with a scale and an integer zero point for every 32 columns of a row: (code - zero) * scale. These
// come
//   as codes from a quantised checkpoint, and are not looked for.
// - BYTES: 8 bits, with a scale for every 32 columns of a row: the same numbers, or the nearest ones where
//   the config asked for it.
//
// The few numbers that do not fit are kept in a list and put back. Nothing is lost, except in that last case.
//
// In all of them a matrix is blocks of 32 rows, and steps of 32 columns. In the first two a block is steps that are,
// once unpacked, two tiles of 16 rows: 16 pairs of columns of 16 rows x 2 numbers, the right side of a product with
// tiles. In the others, whose numbers share scales along a row, a block is two strips of 16 rows, each of them steps
// whose rows come out one by one: the left side of a product with tiles, whose sums are then to be transposed, or of a
// dot product.
#pragma once

#include <cstddef>
#include <cstdint>

#include "numbers.h"

namespace {

enum Format { BF16 = 0, BF12 = 1, BYTES = 2, NIBBLES = 3, INT4 = 4, FORMATS };

// What the config asks for: 16 bits; the same numbers in as few as will do; at most 8 bits, the nearest numbers where
// they do not fit exactly; the same numbers in 12, whether or not they lie on a grid.
enum Wanted { PLAIN = 0, EXACT = 1, EIGHT = 2, TWELVE = 3 };

constexpr int MB = 32, NB = 32, KB = 32;  // rows, columns of a block of sums; columns of a step
constexpr int STRIP = 16;                 // rows of a strip
constexpr int STEP = NB * KB;             // numbers of a step

constexpr bool in_nibbles(Format f) { return f == NIBBLES || f == INT4; }
constexpr bool in_strips(Format f) { return f == BYTES || in_nibbles(f); }

// Of a strip's step: codes, then scales. NIBBLES have float16 scales and then least numbers, INT4 a word for both: a
// float32 scale, whose lowest five bits, which are zero in all that is kept so, hold the zero point instead. So float16
// and bf16 scales fit, and both code * scale and zero * scale are exact in float32.
constexpr size_t code_bytes(Format f) { return f == BYTES ? STRIP * KB : STRIP * KB / 2; }
constexpr size_t strip_bytes(Format f) { return code_bytes(f) + STRIP * sizeof(float16) * (f == BYTES ? 1 : 2); }

constexpr uint32_t ZERO_BITS = 31;  // of INT4's words

constexpr size_t step_bytes(Format f) { return f == BF16 ? STEP * 2 : f == BF12 ? STEP * 3 / 2 : 2 * strip_bytes(f); }

// Where number `i` of row `j` (both below 32) stands in an unpacked step.
inline int place(int j, int i) { return (j / 16) * 512 + (i / 2) * 32 + (j % 16) * 2 + (i & 1); }

}  // namespace
