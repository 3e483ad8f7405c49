"""What codes mean, in tiles. Importing this module imports triton."""
# ruff: noqa: N803 - compile-time constants are written in capitals, as everywhere in Triton
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

INTEGER = tl.constexpr(0)
E4M3 = tl.constexpr(1)
E5M2 = tl.constexpr(2)
E2M1 = tl.constexpr(3)


def _halves(each: str, factor: str, add: str) -> tl.constexpr:
    """Return PTX that makes 2 x 2 numbers of 16 bits of 2 bytes, which a thread has side by side in the tensor cores'
    layout: $0 of the low halves, $1 of the high ones. `each` makes ``low`` and ``high`` of ``pair``, which has a byte
    in each 16 bits. ``factor`` and ``add`` are what it multiplies by and adds, which may be no constants in PTX.
    """
    return tl.constexpr(
        f"{_begin(factor, add)}cvt.u32.u16 pair, $2;\nprmt.b32 pair, pair, 0, 0x4140;\n{each}"
        "mov.b32 $0, low;\nmov.b32 $1, high;\n}"
    )


def _begin(factor: str, add: str) -> str:
    names = ".reg .b32 pair, low, high, sign, factor, add, mask;"
    return f"{{\n{names}\nmov.b32 factor, {factor};\nmov.b32 add, {add};\n"


def _integers(one: str, magic: str, less: str, kind: str) -> tl.constexpr:
    """Put bits below those of `magic`, a power of two whose last bit counts 1, and add `less`."""
    return _halves(
        f"mov.b32 mask, 0x000f000f;\nlop3.b32 low, pair, mask, {magic}, 0xea;\nfma.rn.{kind}x2 low, low, factor, add;\n"
        f"shr.u32 high, pair, 4;\nlop3.b32 high, high, mask, {magic}, 0xea;\n"
        f"fma.rn.{kind}x2 high, high, factor, add;\n",
        one,
        less,
    )


def _small_floats(kind: str, left: tuple[int, int], mask: str, factor: str) -> tl.constexpr:
    """Put sign and bits where the wide type has its sign and lowest exponents, and multiply by `factor`."""
    return _halves(
        f"shl.b32 sign, pair, 12;\nand.b32 sign, sign, 0x80008000;\nshl.b32 low, pair, {left[0]};\n"
        f"lop3.b32 low, low, {mask}, sign, 0xea;\nfma.rn.{kind}x2 low, low, factor, add;\n"
        f"shl.b32 sign, pair, 8;\nand.b32 sign, sign, 0x80008000;\nshl.b32 high, pair, {left[1]};\n"
        f"lop3.b32 high, high, {mask}, sign, 0xea;\nfma.rn.{kind}x2 high, high, factor, add;\n",
        factor,
        "0x80008000",
    )


def _e4m3(kind: str, right: int, mask: str, factor: str) -> tl.constexpr:
    """As `_small_floats`, for 2 numbers of 8 bits."""
    return tl.constexpr(
        f"{_begin(factor, '0x80008000')}cvt.u32.u16 pair, $1;\nprmt.b32 pair, pair, 0, 0x1404;\n"
        f"shr.u32 low, pair, {right};\nand.b32 low, low, {mask};\nlop3.b32 low, pair, 0x80008000, low, 0xea;\n"
        f"fma.rn.{kind}x2 $0, low, factor, add;\n}}"
    )


UNSIGNED_BF16 = _integers("0x3f803f80", "0x43004300", "0xc300c300", "bf16")
UNSIGNED_FP16 = _integers("0x3c003c00", "0x64006400", "0xe400e400", "f16")
SIGNED_BF16 = _integers("0x3f803f80", "0x43004300", "0xc308c308", "bf16")
SIGNED_FP16 = _integers("0x3c003c00", "0x64006400", "0xe408e408", "f16")
E2M1_BF16 = _small_floats("bf16", (6, 2), "0x01c001c0", "0x7e807e80")
E2M1_FP16 = _small_floats("f16", (9, 5), "0x0e000e00", "0x74007400")
E4M3_BF16 = _e4m3("bf16", 4, "0x07f007f0", "0x7b807b80")
E4M3_FP16 = _e4m3("f16", 1, "0x3f803f80", "0x5c005c00")


@triton.jit
def numbers(codes, CODE: tl.constexpr, OFFSET: tl.constexpr):
    """Codes, one in each uint8, as float32, exactly: integers less `OFFSET`, and floats put where float32 has its sign
    and lowest exponents. NaN and infinities are no codes here.
    """
    bits = codes.to(tl.int32)
    if CODE == INTEGER:
        return (bits | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + OFFSET)
    if CODE == E2M1:
        return (((bits & 8) << 28) | ((bits & 7) << 22)).to(tl.float32, bitcast=True) * 2.0**126
    if CODE == E4M3:
        return (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 2.0**120
    return (((bits & 0x80) << 24) | ((bits & 0x7F) << 21)).to(tl.float32, bitcast=True) * 2.0**112


@triton.jit
def halves(packed, dtype: tl.constexpr, CODE: tl.constexpr, OFFSET: tl.constexpr, PTX: tl.constexpr):
    """Return the numbers of the low and of the high halves of bytes, in `dtype`, which holds all of them exactly."""
    if PTX:
        PLACES: tl.constexpr = "=r,=r,h"
        if dtype == tl.bfloat16:
            TEXT: tl.constexpr = E2M1_BF16 if CODE == E2M1 else SIGNED_BF16 if OFFSET == 8 else UNSIGNED_BF16
            return tl.inline_asm_elementwise(TEXT, PLACES, [packed], (tl.bfloat16, tl.bfloat16), True, 2)
        else:
            SHORT: tl.constexpr = E2M1_FP16 if CODE == E2M1 else SIGNED_FP16 if OFFSET == 8 else UNSIGNED_FP16
            return tl.inline_asm_elementwise(SHORT, PLACES, [packed], (tl.float16, tl.float16), True, 2)
    return numbers(packed & 15, CODE, OFFSET).to(dtype), numbers(packed >> 4, CODE, OFFSET).to(dtype)


@triton.jit
def whole(codes, dtype: tl.constexpr, CODE: tl.constexpr, OFFSET: tl.constexpr, PTX: tl.constexpr):
    """Return the numbers of bytes, in `dtype`, which holds all of them exactly."""
    if PTX and CODE == E4M3:
        if dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(E4M3_BF16, "=r,h", [codes], tl.bfloat16, True, 2)
        else:
            return tl.inline_asm_elementwise(E4M3_FP16, "=r,h", [codes], tl.float16, True, 2)
    return numbers(codes, CODE, OFFSET).to(dtype)
