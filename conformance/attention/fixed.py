"""The suite of AttentionBackend: decode batches of a fixed size, captured and replayed (capability `graph`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from pegboard.conformance.attention.base import DECODES, RAGGED, TOLERANCES, AttentionSuite, matrix
from pegboard.conformance.attention.batches import AttentionRig, make_layer
from pegboard.conformance.attention.fixed_rig import FixedRig
from pegboard.conformance.rig.tape import TapeCapture
from pegboard.conformance.suite import capability
from pegboard.core.interfaces.attention import AttentionBackend
from pegboard.core.interfaces.graphs import GraphCapture
from pegboard.toolkit.graphs import capture_of

Steps = Sequence[tuple[int, Sequence[int]]]
"""Size of a batch, and the lengths of its real requests; those behind are padding."""

_CASES = matrix((1, 16, 64), (None, 20, 150), (None, torch.float8_e4m3fn, torch.float8_e5m2))


class AttentionFixedTests(AttentionSuite):
    """`forward` is recorded once per size and then replayed, on a CPU with `TapeCapture`: the same operators and
    launches with the addresses and scalars of the first time. What is right is as for any other batch, of padding, too:
    requests of row 0 with one token.
    """

    def capture_for(self, device: torch.device) -> GraphCapture:
        """Return what records graphs. On a CPU kernels of one's own have to be launched as `toolkit.kernels` says."""
        return capture_of(device) or TapeCapture()

    def check_steps(self, rig: FixedRig, steps: Steps, backend: AttentionBackend | None = None) -> None:
        capture = self.capture_for(rig.device)
        backend = self.build(rig.context()) if backend is None else backend
        for step, (size, lens) in enumerate(steps):
            for answer in rig.step(backend, capture, size, lens):
                assert answer.out.dtype == rig.dtype
                error = (answer.out.cpu().double() - answer.expected).abs().flatten(1).amax(1)
                wrong = (~(error <= TOLERANCES[rig.dtype])).nonzero().flatten().tolist()
                assert not wrong, (
                    f"{answer.layer}: step {step}, a batch of {size} with lengths {list(lens)}: rows {wrong} are off; "
                    f"those from {answer.real} on are padding"
                )

    @capability("graph")
    def test_fixed_lengths(self, device: torch.device) -> None:
        """They grow and shrink, beyond whatever the first batch of the size would have been split into."""
        rig = FixedRig([make_layer()], (3,), 330, page_size=16, device=device)
        lens = ((2, 1, 9), (330, 40, 5), (17, 300, 129), (1, 2, 1))
        self.check_steps(rig, [(3, one) for one in lens])

    @capability("graph")
    def test_fixed_sizes(self, device: torch.device) -> None:
        """In any order, so that what one size leaves behind meets the next one."""
        rig = FixedRig([make_layer(6, 2)], (1, 2, 5), 60, device=device)
        orders = ((5, (50, 3, 20, 9, 31)), (1, (60,)), (2, (7, 8)), (5, (1, 60, 2, 3, 4)), (2, (33, 1)), (1, (2,)))
        self.check_steps(rig, orders)

    @capability("graph")
    def test_fixed_padding(self, device: torch.device) -> None:
        """It is what it should be, whatever stood there before, and does nothing to its neighbours."""
        rig = FixedRig([make_layer()], (6,), 50, device=device)
        lens = ((50, 41, 32, 23, 14, 5), (9,), (12, 50, 7, 3), (3, 3, 3, 3, 3, 50))
        self.check_steps(rig, [(6, one) for one in lens])

    @capability("graph")
    def test_fixed_layers(self, device: torch.device) -> None:
        """All kinds of layers in one graph."""
        rig = FixedRig(self.all_layers(window=11), (4,), 70, device=device)
        self.check_steps(rig, [(4, (70, 2)), (4, (3, 66, 9, 30))])

    @capability("graph")
    @torch.inference_mode()
    def test_fixed_between_others(self, device: torch.device) -> None:
        """Prompts, and decodes of more requests than any graph has, run in between and leave the graphs alone."""
        rig = FixedRig([make_layer()], (2,), 80, device=device)
        backend: AttentionBackend = self.build(rig.context(max_batch=9))
        capture = self.capture_for(device)
        for lens in ((80, 5), (3, 70)):
            for answer in rig.step(backend, capture, 2, lens):
                error = (answer.out.cpu().double() - answer.expected).abs().max()
                assert float(error) <= TOLERANCES[torch.float32]
            for others in (RAGGED, DECODES, ((70, 1),) * 9):
                other = AttentionRig([make_layer()], others, device=device)
                self.check(other, other.run(backend))

    @capability("graph")
    @capability("kv_fp8")
    def test_fixed_eight_bit(self, device: torch.device) -> None:
        rig = FixedRig([make_layer(4, 2, 24)], (3,), 70, page_size=16, kv_dtype=torch.float8_e4m3fn, device=device)
        self.check_steps(rig, [(3, (70, 2, 9)), (3, (3, 66))])

    @pytest.mark.full
    @capability("graph")
    @pytest.mark.parametrize(("page_size", "shape", "window", "cap", "sinks", "dtype", "kept"), _CASES, ids=str)
    def test_fixed_matrix(
        self,
        page_size: int,
        shape: tuple[int, int, int, int],
        window: int | None,
        cap: float | None,
        sinks: bool,
        dtype: torch.dtype,
        kept: torch.dtype | None,
        device: torch.device,
    ) -> None:
        layer = self.layer_of(shape, window, cap, sinks)
        kept = kept if self.has("kv_fp8") else None
        rig = FixedRig([layer], (2, 5), 200, page_size=page_size, dtype=dtype, kv_dtype=kept, device=device)
        random = np.random.default_rng(page_size)
        steps = [(size, random.integers(1, 200, random.integers(1, size + 1)).tolist()) for size in (5, 2, 5, 2, 5)]
        self.check_steps(rig, steps)
