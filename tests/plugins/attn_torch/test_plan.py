"""What the torch backend computes once per batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.attention.batches import AttentionRig, attention_reference, make_layer
from pegboard.conformance.properties import properties
from pegboard.core.interfaces.layers import LayerSpec
from pegboard.plugins.attn_torch.backend import TorchAttention
from pegboard.plugins.attn_torch.gather import Scratch
from pegboard.plugins.attn_torch.masks import CausalMasks
from pegboard.plugins.attn_torch.plan import MOST_TOKENS, Plan, _similar, make_plan
from pegboard.plugins.attn_torch.softmax import attend

CPU = torch.device("cpu")


def plan_of(lens: list[tuple[int, int]], window: int | None = None) -> Plan:
    rig = AttentionRig([make_layer()], lens)
    return make_plan(rig.batch(TorchAttention(None, rig.context_for())), 0, window, torch.float32)  # type: ignore[arg-type]


@properties()
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40))
def test_groups_waste_little(lengths: list[int]) -> None:
    seen = np.array(lengths, dtype=np.int64)
    groups = _similar(np.arange(len(lengths)), seen)
    assert sorted(row for group in groups for row in group.tolist()) == list(range(len(lengths)))
    for group in groups:
        shortest, longest = seen[group].min(), seen[group].max()
        assert shortest >= 0.75 * longest or longest - shortest <= 64
        assert (np.diff(group) > 0).all(), "the order of the batch, so that tokens can be a slice"


def test_alike_decodes_share_a_call_without_a_mask() -> None:
    (group,) = plan_of([(20, 1), (20, 1), (20, 1)]).decodes
    assert group.tokens == slice(0, 3)
    assert (group.size, group.length, group.mask) == (3, 21, None)


def test_padding_repeats_a_slot_of_the_request() -> None:
    rig = AttentionRig([make_layer()], [(20, 1), (9, 1)])
    (group,) = make_plan(rig.batch(TorchAttention(None, rig.context_for())), 0, None, torch.float32).decodes  # type: ignore[arg-type]
    assert isinstance(group.slots, torch.Tensor)
    for request, slots in enumerate(group.slots.view(2, 21)):
        assert set(slots.tolist()) == set(rig.slots[0][request].tolist())


def test_one_long_request_does_not_pad_the_others() -> None:
    groups = plan_of([(40, 1), (3000, 1), (50, 1), (45, 1)]).decodes
    assert [(group.size, group.length) for group in groups] == [(1, 3001), (3, 51)]


def test_consecutive_slots_are_read_in_place() -> None:
    rig = AttentionRig([make_layer()], [(37, 1), (0, 9)], page_size=64)  # a page each
    batch = rig.batch(TorchAttention(None, rig.context_for()))  # type: ignore[arg-type]
    plan = make_plan(batch, 0, None, torch.float32)
    first = [int(slots[0]) for slots in rig.slots[0]]
    assert plan.decodes[0].slots == slice(first[0], first[0] + 38)
    assert plan.extends[0].slots == slice(first[1], first[1] + 9)


def test_a_window_gathers_its_tail_only() -> None:
    plan = plan_of([(500, 1), (600, 1), (700, 20)], window=16)
    assert [group.length for group in plan.decodes] == [16]
    (span,) = plan.extends
    assert span.first == 700 - 15
    assert isinstance(span.slots, torch.Tensor)
    assert len(span.slots) == 15 + 20


def test_layers_share_plans_and_none_is_made_in_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [make_layer(layer_id=index, window=8 if index % 2 else None) for index in range(6)]
    rig = AttentionRig(layers, [(5, 3), (9, 1)])
    backend = TorchAttention(None, rig.context_for())  # type: ignore[arg-type]
    batch = rig.batch(backend)
    backend.prepare(batch)
    assert len(batch.attn_metadata) == 2

    def refuse(*args: Any) -> Plan:
        raise AssertionError("a plan was made in forward")

    monkeypatch.setattr("pegboard.plugins.attn_torch.backend.make_plan", refuse)
    for index, layer in enumerate(layers):
        k, v = rig.new_kv(index)
        backend.forward(rig.q[index], k, v, layer, batch)


@pytest.mark.parametrize("window", [None, 1, 3, 20])
def test_one_mask_serves_all_blocks(window: int | None) -> None:
    masks = CausalMasks(16, 100, torch.float32, CPU)
    for rows, cols in ((4, 9), (16, 40), (1, 3), (16, 100), (7, 7)):
        if window is not None:
            cols = min(cols, rows + window - 1)
        got = masks.get(rows, cols, window)
        query = torch.arange(cols - rows, cols)[:, None]
        key = torch.arange(cols)
        seen = key <= query
        if window is not None:
            seen &= key > query - window
        assert torch.equal(got == 0, seen)
        assert torch.equal(got == float("-inf"), ~seen)


def test_masks_stay_small() -> None:
    masks = CausalMasks(256, 4096, torch.float32, CPU)
    masks.get(256, 3000, None)
    masks.get(256, 300, 128)
    assert [mask.shape for mask in masks._masks.values()] == [(256, 4096), (256, 383)]


@pytest.mark.parametrize("layer", [make_layer(logit_cap=1e6), make_layer()], ids=["written out", "fused"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_accumulate_in_float32(layer: LayerSpec, dtype: torch.dtype) -> None:
    """4096 equal weights: summed in 16 bits, they stop growing at 256 or 2048 of them. One unit in the last place."""
    q, k = torch.zeros(1, 4, 16, dtype=dtype), torch.zeros(4096, 2, 16, dtype=dtype)
    v = torch.rand(4096, 2, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = attend(q.view(1, 2, 2, 16), k.transpose(0, 1)[None], v.transpose(0, 1)[None], layer).view(1, 4, 16)
    expected = attention_reference(q, k, v, make_layer())
    torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=0)


def test_gathers_stay_small() -> None:
    """However many requests decode: what a call gathers is bounded, and so is the memory that is kept for it."""
    lengths = np.full(64, 1000, dtype=np.int64)
    assert [len(group) for group in _similar(np.arange(64), lengths)] == [8] * 8
    scratch, source = Scratch(torch.float32, CPU), torch.rand(10_000, 2, 3)
    for count in (1, 300, 299, 5000, MOST_TOKENS, MOST_TOKENS + 1):
        rows = torch.randint(10_000, (count,))
        assert torch.equal(scratch.take(source, rows), source[rows])
        assert scratch._buffer.numel() <= MOST_TOKENS * 6


def test_serves_in_and_out_of_inference_mode() -> None:
    rig = AttentionRig([make_layer()], [(9, 1), (20, 1)])
    backend = TorchAttention(None, rig.context_for())  # type: ignore[arg-type]
    first = rig.run(backend)
    batch = rig.batch(backend)
    backend.prepare(batch)
    assert torch.equal(backend.forward(rig.q[0], *rig.new_kv(), rig.layers[0], batch), first)
