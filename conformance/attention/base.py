"""What all tests of attention backends start from: batches over poisoned memory, and how close an answer must be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from pegboard.conformance.attention.batches import AttentionRig, Lens, make_layer, make_sinks
from pegboard.conformance.covering import covering
from pegboard.conformance.suite import ContractSuite
from pegboard.core.interfaces.attention import AttentionBackend
from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.forward import ForwardMode
from pegboard.core.interfaces.layers import LayerSpec

TOLERANCES = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""How far an output may be off, absolutely.

Outputs are means of values of the order of 1 (up to 4), and the reference computes in float64 from the same rounded
inputs, so what is left is the backend's own rounding. In float32, a score is off by up to 2.5 * 2^-24 of the norms of q
and k times the scale, 1e-6 here, and a weight by twice that relative to itself: 1e-5 of values up to 4. In 16 bits the
weights are rounded before they meet the values and the output at the end, each by half a unit in the last place, 2^-11
or 2^-8 of up to 4; the bounds are two to three times that.
"""

RAGGED: Lens = ((0, 5), (9, 3), (0, 1), (17, 11), (6, 1))
"""Prompts and chunks after a prefix, long and short, and two requests that only decode."""

DECODES: Lens = ((0, 1), (3, 1), (16, 1), (40, 1), (21, 1))


SHAPES = ((4, 4, 16, 16), (9, 3, 24, 16), (20, 1, 13, 40))
"""(heads, KV heads, dimension of q and k, of v)."""


def matrix(
    pages: Sequence[object], windows: Sequence[int | None], kept: Sequence[torch.dtype | None]
) -> list[tuple[object, ...]]:
    """Return settings of which each two stand together in one: pages, shape, window, cap, sinks, dtype, type of KV."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    return covering(itertools.product(pages, SHAPES, windows, (None, 2.0), (False, True), dtypes, kept))


class AttentionSuite(ContractSuite):
    """Builds the backend under test, and compares what it answers."""

    contract = "attention"

    @pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    def device(self, request: pytest.FixtureRequest) -> torch.device:
        """Each test runs on the CPU, where the backend supports it, and on a GPU, where there is one."""
        return torch.device(request.param)

    def make(self, rig: AttentionRig) -> AttentionBackend:
        """Return the backend for a rig's layers. Skips where it does not support them."""
        backend: AttentionBackend = self.build(rig.context_for())
        return backend

    def layer_of(
        self,
        shape: tuple[int, int, int, int],
        window: int | None = None,
        cap: float | None = None,
        sinks: bool = False,
        layer_id: int = 0,
    ) -> LayerSpec:
        """Return a layer with as much of this as the backend has."""
        window, cap = window if self.has("sliding_window") else None, cap if self.has("logit_cap") else None
        return make_layer(*shape, layer_id=layer_id, window=window, logit_cap=cap, sinks=sinks and self.has("sinks"))

    def all_layers(self, window: int) -> list[LayerSpec]:
        """Return layers with all that the backend has, and with row tables of their own."""
        return [
            make_layer(),
            make_layer(6, 3, 24, layer_id=1, kv_group=1, scale=0.4),
            self.layer_of((4, 2, 16, 16), window, layer_id=2),
            self.layer_of((5, 1, 8, 16), None, 2.0, True, layer_id=3),
        ]

    def check(self, rig: AttentionRig, out: torch.Tensor, index: int = 0, sinks: torch.Tensor | None = None) -> None:
        """Compare an output for one of the rig's layers."""
        layer = rig.layers[index]
        assert out.dtype == rig.dtype
        assert tuple(out.shape) == (int(rig.new.sum()), layer.num_heads, layer.v_head_dim)
        error = (out.cpu().double() - rig.expected(index, sinks)).abs().flatten(1).amax(1)
        bound = TOLERANCES[rig.dtype]
        wrong = (~(error <= bound)).nonzero().flatten().tolist()
        if wrong:
            owner = np.repeat(np.arange(len(rig.new)), rig.new)[wrong[0]]
            pytest.fail(
                f"{layer}, page size {rig.page_size}: {len(wrong)} of {len(error)} tokens are off, the worst by "
                f"{float(error[wrong].max()):.3g} (allowed: {bound}); first of request {owner}, which has "
                f"{rig.prefix[owner]} cached and {rig.new[owner]} new tokens"
            )

    def check_lens(
        self, layer: LayerSpec, lens: Lens, device: torch.device, *, page_size: int = 4, mode: ForwardMode | None = None
    ) -> None:
        """Run and compare one layer in float32."""
        rig = AttentionRig([layer], lens, page_size=page_size, device=device)
        sinks = make_sinks(layer, device)
        self.check(rig, rig.run(self.make(rig), mode=mode, sinks=sinks), sinks=sinks)

    def check_refused(self, name: str, layer: LayerSpec, device: torch.device) -> None:
        """Objecting beforehand or raising Unsupported: what must not happen is a silent wrong answer."""
        rig = AttentionRig([layer], RAGGED, device=device)
        ctx = rig.context_for()
        if self.objection(ctx) is not None:
            return
        with pytest.raises(Unsupported, match=name):
            rig.run(self.make(rig), sinks=make_sinks(layer, device))

    def has(self, name: str) -> bool:
        return name in self.capabilities
