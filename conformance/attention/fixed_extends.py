"""The suite of AttentionBackend: extend and mixed batches of fixed numbers of tokens, captured and replayed (capability
`graph_extend`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from pegboard.conformance.attention.base import DECODES, SHAPES, TOLERANCES
from pegboard.conformance.attention.batches import AttentionRig, Lens, make_layer
from pegboard.conformance.attention.fixed import AttentionFixedTests
from pegboard.conformance.attention.fixed_rig import FixedRig, Shape
from pegboard.conformance.suite import capability
from pegboard.core.interfaces.attention import AttentionBackend

Extends = Sequence[tuple[Shape, Lens]]

SHORT: Shape = (12, 2, 0)
LONG: Shape = (40, 3, 0)
MIXED: Shape = (40, 3, 5)


class AttentionFixedExtendTests(AttentionFixedTests):
    """As for decode batches, but what is answered for padding tokens is anything, NaN included."""

    def check_extends(self, rig: FixedRig, steps: Extends, backend: AttentionBackend | None = None) -> None:
        capture = self.capture_for(rig.device)
        backend = self.build(rig.context()) if backend is None else backend
        for step, (shape, lens) in enumerate(steps):
            for answer in rig.extend(backend, capture, shape, lens):
                assert answer.out.dtype == rig.dtype
                error = (answer.out.cpu().double() - answer.expected).abs().flatten(1).amax(1)
                wrong = (~(error <= TOLERANCES[rig.dtype])).nonzero().flatten().tolist()
                assert not wrong, f"{answer.layer}: step {step}, {shape} with {list(lens)}: tokens {wrong} are off"

    @capability("graph_extend")
    def test_fixed_prefills(self, device: torch.device) -> None:
        """Of any number and length, behind prefixes that the first batch of the shape did not have."""
        lens: tuple[Lens, ...] = (
            ((0, 3),),
            ((0, 40),),
            ((90, 2), (0, 19), (7, 2)),
            ((0, 5), (300, 30)),
            ((16, 16), (33, 15)),
            ((1, 2),),
        )
        self.check_extends(
            FixedRig([make_layer()], (9,), 340, page_size=16, device=device), [(LONG, pairs) for pairs in lens]
        )

    @capability("graph_extend")
    def test_fixed_mixed(self, device: torch.device) -> None:
        """Requests of one new token stand anywhere, are all there are, or are none."""
        lens: tuple[Lens, ...] = (
            ((0, 20), (50, 1), (330, 1), (0, 1)),
            ((9, 1), (8, 1), (7, 1), (6, 1), (200, 1)),
            ((4, 1), (0, 30), (19, 1), (6, 4), (3, 1)),
            ((0, 40),),
            ((339, 1),),
        )
        rig = FixedRig([make_layer(6, 2)], (9,), 340, page_size=16, device=device)
        self.check_extends(rig, [(MIXED, pairs) for pairs in lens])

    @capability("graph_extend")
    def test_fixed_shapes(self, device: torch.device) -> None:
        """In any order, so that what one shape leaves behind meets the next one."""
        rig = FixedRig([make_layer()], (9,), 90, device=device)
        steps: Extends = (
            (MIXED, ((0, 30), (40, 1), (5, 1))),
            (SHORT, ((60, 5), (0, 7))),
            (LONG, ((3, 33), (80, 2))),
            (SHORT, ((0, 2),)),
            (MIXED, ((77, 1), (2, 3))),
            (LONG, ((50, 40),)),
        )
        self.check_extends(rig, steps)

    @capability("graph_extend")
    def test_fixed_extend_layers(self, device: torch.device) -> None:
        """All kinds of layers in one graph."""
        rig = FixedRig(self.all_layers(window=11), (9,), 70, device=device)
        self.check_extends(rig, [(MIXED, ((30, 9), (69, 1), (0, 25))), (MIXED, ((2, 1), (20, 35)))])

    @capability("graph_extend")
    @torch.inference_mode()
    def test_fixed_extends_between_others(self, device: torch.device) -> None:
        """Graphs of decodes, and batches that are no graphs, run in between and leave the others alone."""
        rig = FixedRig([make_layer()], (9, 2), 80, device=device)
        backend: AttentionBackend = self.build(rig.context())
        for shape, lens in ((MIXED, ((0, 12), (70, 1))), (LONG, ((9, 9), (60, 4)))) * 2:
            self.check_extends(rig, [(shape, lens)], backend)
            self.check_steps(rig, [(2, (70, 3)), (9, (1, 80))], backend)
            for others in (DECODES, ((0, 50), *((70, 1),) * 10)):
                other = AttentionRig([make_layer()], others, device=device)
                self.check(other, other.run(backend))

    @capability("graph_extend")
    @capability("kv_fp8")
    def test_fixed_extends_eight_bit(self, device: torch.device) -> None:
        rig = FixedRig([make_layer(4, 2, 24)], (9,), 70, page_size=16, kv_dtype=torch.float8_e4m3fn, device=device)
        self.check_extends(rig, [(MIXED, ((0, 20), (50, 1))), (MIXED, ((60, 2), (0, 1)))])

    @pytest.mark.full
    @capability("graph_extend")
    @pytest.mark.parametrize("page_size", [1, 16])
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
    def test_fixed_extends_matrix(
        self, page_size: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        layers = [make_layer(*shape), self.layer_of(shape, 20, 2.0, True, layer_id=1)]
        rig = FixedRig(layers, (9,), 200, page_size=page_size, dtype=dtype, device=device)
        random = np.random.default_rng(page_size)
        steps = []
        for turn in range(5):
            new = [int(random.integers(2, 14)) for _ in range(int(random.integers(0, 4)))]
            new += [1] * int(random.integers(turn == 0 or not new, 6)) if turn % 2 == 0 else [] if new else [2]
            lens = [(int(random.integers(0, 180)), count) for count in new]
            steps.append((MIXED if 1 in new else LONG, tuple(lens)))
        self.check_extends(rig, steps)
