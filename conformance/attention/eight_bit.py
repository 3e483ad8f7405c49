"""The suite of AttentionBackend: keys and values in 8 bits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from pegboard.conformance.attention.base import DECODES, RAGGED, AttentionSuite
from pegboard.conformance.attention.batches import AttentionRig, Lens, make_layer, make_sinks
from pegboard.conformance.attention.tree_rig import TreeRig
from pegboard.conformance.covering import covering
from pegboard.conformance.suite import capability, lacks
from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.forward import ForwardMode
from pegboard.toolkit.model.eight_bit import as_bytes

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TYPES = pytest.mark.parametrize("kept", [E4M3, E5M2], ids=["e4m3", "e5m2"])

_EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 7},
    "cap": {"logit_cap": 2.0, "scale": 0.8},
    "sinks": {"sinks": True},
    "all": {"window": 40, "logit_cap": 2.0, "sinks": True},
}
_CASES = covering(
    itertools.product(
        (E4M3, E5M2),
        (torch.float32, torch.float16, torch.bfloat16),
        (1, 16, 64),
        tuple(_EXTRAS),
        (((64, 1), (0, 1), (100, 1)), ((0, 40), (70, 1), (33, 9))),
    )
)


class AttentionEightBitTests(AttentionSuite):
    """Against float64 over the numbers that the pool holds, times its scales: what is left is the backend's own
    rounding, and the bounds are those of the other tests. No scale is 1, and no two are the same.
    """

    def check_eight_bit(self, kept: torch.dtype, lens: Lens, device: torch.device, extra: str, **more: Any) -> None:
        """Run and compare one layer, with what of `extra` the backend has."""
        wanted = {"window": "sliding_window", "logit_cap": "logit_cap", "sinks": "sinks", "scale": "kv_fp8"}
        settings = {name: value for name, value in _EXTRAS[extra].items() if self.has(wanted[name])}
        rig = AttentionRig([make_layer(6, 2, 24, 16, **settings)], lens, kv_dtype=kept, device=device, **more)
        sinks = make_sinks(rig.layers[0], device)
        self.check(rig, rig.run(self.make(rig), sinks=sinks), sinks=sinks)

    @capability("kv_fp8")
    @TYPES
    @pytest.mark.parametrize("lens", [RAGGED, DECODES], ids=["ragged", "decode"])
    def test_eight_bit(self, kept: torch.dtype, lens: Lens, device: torch.device) -> None:
        self.check_eight_bit(kept, lens, device, "all")

    @capability("kv_fp8")
    @TYPES
    def test_eight_bit_in_half(self, kept: torch.dtype, device: torch.device) -> None:
        self.check_eight_bit(kept, DECODES, device, "plain", dtype=torch.float16, page_size=16)

    @pytest.mark.full
    @capability("kv_fp8")
    @pytest.mark.parametrize(("kept", "dtype", "page_size", "extra", "lens"), _CASES, ids=str)
    def test_eight_bit_matrix(
        self, kept: torch.dtype, dtype: torch.dtype, page_size: int, extra: str, lens: Lens, device: torch.device
    ) -> None:
        self.check_eight_bit(kept, lens, device, extra, dtype=dtype, page_size=page_size)

    @capability("kv_fp8")
    @pytest.mark.parametrize("lens", [RAGGED, DECODES], ids=["ragged", "decode"])
    @torch.inference_mode()
    def test_each_layer_has_its_scales(self, lens: Lens, device: torch.device) -> None:
        """And its keys have another one than its values."""
        rig = AttentionRig([make_layer(), make_layer(layer_id=2, v_dim=8)], lens, kv_dtype=E4M3, device=device)
        backend = self.make(rig)
        batch = rig.batch(backend)
        backend.prepare(batch)
        for index, layer in enumerate(rig.layers):
            self.check(rig, backend.forward(rig.q[index], *rig.new_kv(index), layer, batch), index)

    @capability("kv_fp8")
    @TYPES
    def test_every_number(self, kept: torch.dtype, device: torch.device) -> None:
        """Values of all codes, by a request for each: with one key, the answer is its value. Subnormal ones are there
        under a scale that makes them as large as the others.
        """
        codes = torch.arange(256, dtype=torch.uint8).view(kept)
        finite = codes.float().isfinite()
        numbers = codes.float()[finite]
        small = numbers.abs() < torch.finfo(kept).smallest_normal
        for which, scale in ((~small, 1.0 / torch.finfo(kept).max), (small, 1.0 / torch.finfo(kept).smallest_normal)):
            values = codes[finite][which]
            rows = -(-len(values) // 16)
            rig = AttentionRig([make_layer(2, 1)], [(0, 1)] * rows, kv_dtype=kept, device=device)
            rig.pool.set_scales(0, 1.0, scale)
            padded = torch.zeros(rows * 16, dtype=torch.uint8)
            padded[: len(values)] = as_bytes(values)
            as_bytes(rig.pool.values(0))[rig.new_slots()] = padded.view(rows, 1, 16).to(device)
            as_bytes(rig.pool.keys(0))[rig.new_slots()] = 0
            backend = self.make(rig)
            batch = rig.batch(backend)
            with torch.inference_mode():
                backend.prepare(batch)
                out = backend.forward(rig.q[0], None, None, rig.layers[0], batch).cpu()
            expected = padded.view(kept).double().view(rows, 1, 16).expand(-1, 2, -1) * scale
            torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=0)

    @capability("kv_fp8")
    @TYPES
    @pytest.mark.parametrize("lens", [RAGGED, DECODES], ids=["ragged", "decode"])
    def test_nan_stays_nan(self, kept: torch.dtype, lens: Lens, device: torch.device) -> None:
        """In the request that has it, and nowhere else."""
        rig = AttentionRig([make_layer()], lens, kv_dtype=kept, device=device)
        slot = rig.slots[0][1][0]
        as_bytes(rig.pool.values(0))[slot] = 0x7F
        out = torch.split(rig.run(self.make(rig)).cpu(), rig.new.tolist())
        for request, answer in enumerate(out):
            assert bool(answer.isnan().all() if request == 1 else answer.isfinite().all()), f"request {request}"

    @capability("kv_fp8")
    @capability("tree_mask")
    def test_eight_bit_trees(self, device: torch.device) -> None:
        trees = ((-1, 0, 0, 1, 2), (), (-1, 0, 0))
        rig = TreeRig([make_layer(2, 1)], ((17, 5), (9, 1), (20, 1)), trees, kv_dtype=E5M2, device=device)
        self.check(rig, rig.run(self.make(rig), mode=ForwardMode.MIXED))

    @lacks("kv_fp8")
    def test_eight_bit_is_refused(self, device: torch.device) -> None:
        """Objecting beforehand or raising Unsupported: what must not happen is a silent wrong answer."""
        rig = AttentionRig([make_layer()], RAGGED, kv_dtype=E4M3, device=device)
        if self.objection(rig.context_for()) is None:
            with pytest.raises(Unsupported, match="kv_fp8"):
                rig.run(self.make(rig))
