"""Keys and values of 8 bits: what they become in each way, and the queries beside them."""

from __future__ import annotations

import re

import pytest
import torch

from pegboard.conformance.attention.base import RAGGED
from pegboard.conformance.attention.batches import AttentionRig, Lens, make_layer
from pegboard.plugins.attn_triton.backend import TritonAttention
from pegboard.plugins.attn_triton.options import TritonAttentionOptions
from pegboard.plugins.attn_triton.stored import Stored, widenings
from pegboard.toolkit.model.eight_bit import EIGHT_BIT

E4M3, E5M2 = EIGHT_BIT
TYPES = pytest.mark.parametrize("kept", EIGHT_BIT, ids=["e4m3", "e5m2"])
DECODES: Lens = ((64, 1), (0, 1), (100, 1))


def run_ptx(text: str, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what instructions of PTX make of words, int64 below 2^32: registers $0 and $1 of $2."""
    found = {"$2": words}
    for line in re.findall(r"^\w+\.[bu]32 .*;", text, re.M):
        name, rest = line.rstrip(";").split(" ", 1)
        out, *given = (part.strip() for part in rest.split(","))
        a, b, *more = (found[one] if one in found else torch.tensor(int(one, 0)) for one in given)
        if name == "prmt.b32":
            both, places = a | b << 32, (int(more[0]) >> shift & 7 for shift in (0, 4, 8, 12))
            found[out] = sum(((both >> 8 * place & 0xFF) << 8 * at for at, place in enumerate(places)), 0 * a)
        elif name == "lop3.b32":
            c, table = more[0], int(more[1])
            terms = [(a if at & 4 else ~a) & (b if at & 2 else ~b) & (c if at & 1 else ~c) for at in range(8)]
            found[out] = sum((term for at, term in enumerate(terms) if table >> at & 1), 0 * a) & 0xFFFFFFFF
        else:
            found[out] = {"and.b32": a & b, "add.u32": a + b, "shr.u32": a >> b}[name] & 0xFFFFFFFF
    return found["$0"], found["$1"]


@pytest.mark.usefixtures("interpreted_triton")
@TYPES
def test_four_numbers_at_a_time(kept: torch.dtype) -> None:
    """Every code in every place of a word, with another one beside it; to the bit, but for which NaN it is."""
    from pegboard.plugins.attn_triton import widening

    text, factor = (widening.E4M3_BY_MASKS, 256) if kept == E4M3 else (widening.E5M2_BY_BYTES, 1)
    codes = torch.stack([torch.arange(256) * odd + odd & 0xFF for odd in (1, 3, 255, 85)], 1)
    words = (codes << torch.tensor([0, 8, 16, 24])).sum(1)
    halves = torch.stack([pair >> shift & 0xFFFF for pair in run_ptx(text.value, words) for shift in (0, 16)], 1)
    wide = halves.to(torch.uint16).view(torch.float16).double() * factor
    exact = codes.to(torch.uint8).view(kept).double()
    torch.testing.assert_close(wide, exact, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("capability", "ways"),
    [(None, (1, 2)), ((8, 0), (3, 4)), ((8, 6), (3, 4)), ((8, 9), (5, 4)), ((9, 0), (5, 4)), ((12, 0), (5, 4))],
)
def test_the_way_follows_from_the_device(capability: tuple[int, int] | None, ways: tuple[int, int]) -> None:
    assert widenings(capability) == dict(zip(EIGHT_BIT, ways, strict=True))


@pytest.mark.parametrize(("capability", "left_out"), [(None, 256), ((8, 0), 256), ((9, 0), 1)])
def test_scales_have_what_the_kernels_leave_out(capability: tuple[int, int] | None, left_out: int) -> None:
    for kept, factor in ((E4M3, left_out), (E5M2, 1)):
        rig = AttentionRig([make_layer()], DECODES, kv_dtype=kept)
        batch = rig.batch(TritonAttention(TritonAttentionOptions(), rig.context_for()))
        found = Stored.of(rig.layers[0], 2, batch, widenings(capability)).factors
        plain = Stored.of(rig.layers[0], 2, batch, {}).factors
        k_scale, v_scale = rig.pool.scales(0)
        expected = plain[0] * k_scale * factor, plain[1], v_scale * factor
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("size", "kept", "lens"), [(1e5, E4M3, DECODES), (1e-6, E5M2, DECODES), (1e38, E4M3, RAGGED)], ids=str
)
def test_queries_of_any_size(size: float, kept: torch.dtype, lens: Lens) -> None:
    """In bfloat16, whose range float16 does not have: beside a scale that makes up for it, the answers are the same.

    Queries are exact, and products as in float32: a score of about 5 is off by 5 * 2.5 * 2^-24, which is nothing here.
    Weights are rounded to float16, which moves a mean of values by 2^-11 of the largest at most, and the answer to
    bfloat16, which the interpreter does by cutting it off: 2^-7 of it. Queries that overflow give NaN, and those that
    vanish the mean of all values, which is off by a hundred times as much.
    """
    rig = AttentionRig([make_layer(6, 2, 24, 16, scale=0.2 / size)], lens, dtype=torch.bfloat16, kv_dtype=kept)
    rig.q[0] = (rig.q[0].double().clamp(-3, 3) * size).to(torch.bfloat16)
    rig.q[0][0, 1] = 0
    out = rig.run(TritonAttention(TritonAttentionOptions(), rig.context_for())).double()
    largest = max(float(v.abs().max()) for v in rig.v[0])
    torch.testing.assert_close(out, rig.expected(), rtol=2.0**-7, atol=2.0**-11 * largest)


@pytest.mark.usefixtures("interpreted_triton")
def test_narrowed_queries() -> None:
    """Exact down to 2^-31 of a row's largest number; smaller ones are off by 2^-39 of it at most."""
    from tests.plugins.attn_triton.narrow_kernel import narrow_kernel

    random = torch.Generator().manual_seed(0)
    largest = 2.0 ** torch.tensor([0.0, 17.0, -20.0, 126.0, -80.0, -112.0, -126.0, 0.0])
    down = torch.randint(0, 50, (8, 64), generator=random).double()
    down[:, 0] = 0
    queries = (largest.double()[:, None] * 1.9 * torch.exp2(-down)).to(torch.bfloat16)
    queries[queries < 2.0**-126] = 0  # subnormal: the interpreter does not know them
    queries[7] = 0
    halves, factors = torch.empty(8, 64, dtype=torch.float16), torch.empty(8, 1)
    narrow_kernel[(1,)](queries, halves, factors, ROWS=8, DIM=64)
    back, wanted = halves.double() * factors.double(), queries.double()
    most = wanted.abs().amax(1, keepdim=True)
    large = wanted.abs() >= most * 2.0**-31
    assert bool(halves.isfinite().all())
    assert torch.equal(back[:5][large[:5]], wanted[:5][large[:5]])
    assert bool(((back - wanted).abs() <= torch.maximum(most * 2.0**-39, torch.tensor(2.0**-151))).all())
