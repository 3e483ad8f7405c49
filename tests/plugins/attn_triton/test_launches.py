"""What is launched: the same for all decode batches of a size, whatever their lengths, and nothing copied for them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeGuard

import numpy as np
import pytest
import torch

from pegboard.conformance.attention.batches import AttentionRig, Lens, make_layer
from pegboard.core.interfaces.forward import ForwardBatch, ForwardMode
from pegboard.core.interfaces.on_device import on_device
from pegboard.plugins.attn_triton.backend import TritonAttention
from pegboard.plugins.attn_triton.options import TritonAttentionOptions
from pegboard.toolkit.graphs import StaticExtend
from pegboard.toolkit.kernels.launch import Launch, observed

if TYPE_CHECKING:
    from numpy.typing import NDArray

PARTS = TritonAttentionOptions(kv_parts=4, kv_split=16, block_keys=16)
LAYERS = [make_layer(), make_layer(layer_id=1, window=20), make_layer(6, 3, 24, layer_id=2)]
MIXED: Lens = ((9, 1), (0, 12), (30, 1), (3, 7))


def decodes(*lens: int) -> AttentionRig:
    return AttentionRig(LAYERS, [(one - 1, 1) for one in lens])


class Copies:
    """Counts what goes to the device."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, *arrays: NDArray[np.int64]) -> tuple[torch.Tensor, ...]:
        self.calls.append(len(arrays))
        return on_device(torch.device("cpu"), None, arrays)


def launches(rig: AttentionRig, backend: TritonAttention, batch: ForwardBatch | None = None) -> list[Launch]:
    """Return what a batch, by default the rig's, launches. Nothing of it runs."""
    found: list[Launch] = []
    batch = rig.batch(backend) if batch is None else batch

    def note(one: Launch) -> bool:
        found.append(one)
        return False

    with torch.inference_mode(), observed(note):
        backend.prepare(batch)
        for index, layer in enumerate(rig.layers):
            backend.forward(rig.q[index], *rig.new_kv(index), layer, batch)
    return found


def described(found: list[Launch]) -> list[tuple[object, ...]]:
    """Return kernels, grids, scalars, shapes and constants: all but addresses and the row tables' width."""
    return [
        (
            one.kernel,
            one.grid,
            tuple(arg.dtype if isinstance(arg, torch.Tensor) else arg for arg in one.arguments),
            one.constants,
        )
        for one in found
    ]


def parts_address(one: Launch) -> int:
    """Return where a launch's parts are: the third of the decode kernel's tensors, the first of the reduction's."""
    name = getattr(one.kernel, "__name__", "")
    found = [arg.data_ptr() for arg in one.arguments if isinstance(arg, torch.Tensor)]
    return found[{"decode_kernel": 2, "reduce_kernel": 0}[name]]


def _kept(argument: object) -> TypeGuard[torch.Tensor]:
    """Return whether a launch reads a list: all that is whole numbers."""
    return isinstance(argument, torch.Tensor) and not argument.is_floating_point()


def test_lengths_decide_nothing() -> None:
    """Of a launch; and the memory for parts is where it was."""
    short = decodes(1, 2, 3, 80)
    backend = TritonAttention(PARTS, replace(short.context_for(), max_context_len=400))
    first, again = launches(short, backend), launches(decodes(79, 79, 80, 1), backend)
    assert described(first) == described(again)
    assert [parts_address(one) for one in first] == [parts_address(one) for one in again]


@pytest.mark.parametrize("decodes", [0, 4])
def test_prefills_of_a_graph_are_launched_alike(decodes: int) -> None:
    """Whatever their lengths, and from the same lists: what is launched behind `prepare` is what was recorded."""
    found = []
    rig = AttentionRig(LAYERS, ((0, 64),))
    backend = TritonAttention(PARTS, replace(rig.context_for(max_batch=8), max_context_len=400))
    static = StaticExtend(64, 3, decodes, rig.tables, rig.pool, backend)
    for lens in (((0, 30), (3, 2)), ((20, 2),), ((5, 1), (0, 20), (9, 1)) if decodes else ((9, 9),)):
        others = AttentionRig(LAYERS, lens)
        found.append(launches(rig, backend, static.fill(others.batch(backend, ForwardMode.EXTEND))))
    assert len({str(described(one)) for one in found}) == 1
    addresses = [[arg.data_ptr() for one in all_ for arg in one.arguments if _kept(arg)] for all_ in found]
    assert addresses[0] == addresses[1] == addresses[2]
    names = {getattr(one.kernel, "__name__", "") for one in found[0]}
    assert ("decode_kernel" in names) == (decodes > 0)


@pytest.mark.parametrize("layer", [0, 1])
def test_neighbours_lengths_change_no_bit(layer: int) -> None:
    """A request's answer is the same to the bit in all batches of a size."""
    answers = []
    for others in ((1, 1), (400, 77), (16, 300)):
        rig = AttentionRig([LAYERS[layer]], [(59, 1), *((one - 1, 1) for one in others)])
        same = AttentionRig([LAYERS[layer]], [(59, 1)])
        rig.q[0][0] = same.q[0][0]
        rig.k[0][0], rig.v[0][0] = same.k[0][0], same.v[0][0]
        rig.pool.put(layer, rig.slots[0][0], same.k[0][0], same.v[0][0])
        answers.append(rig.run(TritonAttention(PARTS, rig.context_for()))[0])
    assert all(torch.equal(one, answers[0]) for one in answers[1:])


@pytest.mark.parametrize("lens", [((39, 1), (2, 1), (19, 1)), MIXED, ((0, 40),)], ids=["decode", "mixed", "prefill"])
def test_nothing_is_copied(lens: Lens) -> None:
    """What the kernels have to know of a batch follows from what is on the device anyway."""
    copies = Copies()
    rig = AttentionRig(LAYERS, lens)
    launches(rig, TritonAttention(PARTS, replace(rig.context_for(), bring=copies)))
    assert copies.calls == []


def test_layers_that_are_cut_alike_share_their_tiles() -> None:
    rig = AttentionRig(LAYERS[:2], MIXED)
    found = launches(rig, TritonAttention(PARTS, rig.context_for()))
    names = [getattr(one.kernel, "__name__", "") for one in found]
    assert [names.count(f"{one}_kernel") for one in ("singles", "tiles", "extend")] == [1, 1, 2]


def test_a_shared_prefix_is_read_once() -> None:
    """By one launch for all requests, but in layers with a window, in graphs, and for a request by itself."""
    lens = [(70, 1), (64, 1), (99, 1)]
    for count, fixed, kernels in (
        (3, False, ["prefix_kernel", "decode_kernel", "reduce_kernel"]),
        (3, True, ["decode_kernel", "reduce_kernel"]),
        (1, False, ["decode_kernel", "reduce_kernel"]),
    ):
        for layer in LAYERS[:2]:
            rig = AttentionRig([layer], lens[:count], page_size=16, common=64)
            backend = TritonAttention(PARTS, rig.context_for())
            found = launches(rig, backend, replace(rig.batch(backend), fixed=fixed, common_prefix=64))
            names = [getattr(one.kernel, "__name__", "") for one in found]
            assert names == (kernels[-2:] if layer.window else kernels)
            if len(names) == 3:
                assert found[0].grid[:2] == (1, layer.num_kv_heads), "all queries are rows of one tile"


@pytest.mark.parametrize("singles", [1, 2, 3])
def test_lists_of_single_tokens_are_aligned(singles: int) -> None:
    """Triton compiles a kernel again for arrays that do not begin at a multiple of 16 bytes."""
    rig = AttentionRig([LAYERS[0]], [*((9, 1) for _ in range(singles)), (0, 12)])
    every = launches(rig, TritonAttention(PARTS, rig.context_for()))
    (found,) = (one for one in every if getattr(one.kernel, "__name__", "") == "singles_kernel")
    lists = [arg for arg in found.arguments[:3] if isinstance(arg, torch.Tensor)]
    assert [len(one) for one in lists] == [singles] * 3
    assert {one.storage_offset() * one.itemsize % 16 for one in lists} == {0}


@pytest.mark.parametrize(("kept", "padded"), [(None, 16), (torch.float8_e4m3fn, 32), (torch.float8_e5m2, 32)], ids=str)
def test_eight_bit_values_are_padded_to_32_dimensions(kept: torch.dtype | None, padded: int) -> None:
    """With 16, Triton 3.6 multiplies wrongly on an H100: docs/gpu-results.md."""
    rig = AttentionRig([make_layer(6, 2, 24, 16)], MIXED, kv_dtype=kept)
    found = launches(rig, TritonAttention(PARTS, rig.context_for()))
    sizes = {one.constants["BLOCK_DV"] for one in found if "KV" in one.constants}
    assert sizes == {padded}
