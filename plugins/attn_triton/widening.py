"""Keys and values of 8 bits, and the queries beside them, in the type that products take. Imports triton."""
# ruff: noqa: N803 - compile-time constants are written in capitals, as everywhere in Triton
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

E4M3_BY_MASKS = tl.constexpr("""{
.reg .b32 pair, low, top, half;
prmt.b32 pair, $2, 0, 0x1404;
and.b32 low, pair, 0x7f007f00;
add.u32 top, low, 0x01000100;
lop3.b32 low, top, 0x80008000, low, 0xea;
shr.u32 half, low, 1;
lop3.b32 $0, pair, 0x80008000, half, 0xea;
prmt.b32 pair, $2, 0, 0x3424;
and.b32 low, pair, 0x7f007f00;
add.u32 top, low, 0x01000100;
lop3.b32 low, top, 0x80008000, low, 0xea;
shr.u32 half, low, 1;
lop3.b32 $1, pair, 0x80008000, half, 0xea;
}""")
"""As `widen` does it for one number. A NaN is 0x7f: one more carries into the bit above, which is then set as well."""

E4M3_BY_CONVERSION = tl.constexpr("""{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}""")

E5M2_BY_BYTES = tl.constexpr("""prmt.b32 $0, $2, 0, 0x1404;
prmt.b32 $1, $2, 0, 0x3424;""")


@triton.jit
def widen(x, dtype: tl.constexpr, KV: tl.constexpr, IN_PLACE: tl.constexpr):
    """Keys or values as they are kept, in the type that products take. All but those with KV 0 are bytes:

    - KV 1, e4m3: the bits are put where float16 has its sign and the lower bits of its exponent, which is 8 less: what
      comes out is 2^-8 of the number, exactly, subnormals included; 2^8 is part of the scales that kernels get. Its NaN
      gets the exponent of float16's.
    - KV 2, e5m2: it is the upper half of float16.
    - KV 3 and 4: the same for four numbers at a time, in PTX, which the interpreter does not have.
    - KV 5, e4m3 by the conversion that compute capability 8.9 and later have, two numbers at a time. What comes out is
      the number itself.

    With IN_PLACE the numbers are widened in the layout in which they were loaded, before they are brought into that of
    the products. Triton would otherwise change the layout first. For values that takes a load of each single byte from
    shared memory, since a thread needs those of several keys side by side; for keys it is as good.
    """
    if KV == 1:
        bits = x.to(tl.uint16)
        low = bits & 0x7F
        bits = ((bits & 0x80) << 8) | (low << 7) | tl.where(low == 0x7F, 0x7C00, 0).to(tl.uint16)
        x = bits.to(tl.float16, bitcast=True)
    elif KV == 2:
        x = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif KV > 2:
        # Triton moves only what it knows to be without effects: this is how it is told not to.
        PTX: tl.constexpr = E4M3_BY_MASKS if KV == 3 else E5M2_BY_BYTES if KV == 4 else E4M3_BY_CONVERSION
        x = tl.inline_asm_elementwise(PTX, "=r,=r,r", [x], tl.float16, not IN_PLACE, 4)
    return x.to(dtype)


@triton.jit
def narrowed(tile):
    """Return queries [rows, dim] of bfloat16 in float16, in which keys of 8 bits are exact and cost no second
    conversion; and float32 [rows, 1], by which products with a row are to be multiplied.

    Rows are divided by powers of two, so that the largest number of each lies in [2^14, 2^15): none overflows, whatever
    the queries are. Numbers down to 2^-31 of the largest stay as they are, bit for bit, since bfloat16 has 8 of
    float16's 11 bits. Smaller ones are off by at most 2^-39 of it, and products are added up in float32, which is off
    by more. Rows of which all is below 2^-112 are multiplied by 2^126 only. A row with an infinity or NaN has NaN as
    its products, or infinities, as it had, and no other row has.
    """
    numbers = tile.to(tl.float32)
    exponents = (tl.max(tl.abs(numbers), 1).to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponents = tl.maximum(exponents, 15)
    shrink = ((268 - exponents) << 23).to(tl.float32, bitcast=True)
    factors = ((exponents - 14) << 23).to(tl.float32, bitcast=True)
    return (numbers * shrink[:, None]).to(tl.float16), factors[:, None]
