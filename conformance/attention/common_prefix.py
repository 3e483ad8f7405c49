"""The suite of AttentionBackend: a prefix that all requests of a decode batch share, slot by slot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pegboard.conformance.attention.base import TOLERANCES, AttentionSuite, matrix
from pegboard.conformance.attention.batches import AttentionRig, Lens, make_layer, make_sinks
from pegboard.conformance.suite import capability, lacks
from pegboard.core.interfaces.layers import LayerSpec

_RESTS: Lens = ((0, 1), (5, 1), (40, 1), (1, 1), (17, 1))
"""Tokens behind the prefix: of one request the new one alone."""

_CASES = matrix(((1, 33), (16, 16), (64, 192)), (None, 20, 1000), (None, torch.float8_e4m3fn))
"""With (page size, common prefix) for pages."""


class AttentionPrefixTests(AttentionSuite):
    """Against each request by itself."""

    def shared(self, layers: list[LayerSpec], common: int, rests: Lens = _RESTS, **more: Any) -> AttentionRig:
        lens = [(common + prefix, new) for prefix, new in rests]
        return AttentionRig(layers, lens, common=common, **more)

    def check_shared(self, rig: AttentionRig) -> None:
        sinks = make_sinks(rig.layers[0], rig.device)
        self.check(rig, rig.run(self.make(rig), sinks=sinks), sinks=sinks)

    @capability("shared_prefix")
    @pytest.mark.parametrize(("page_size", "common"), [(1, 1), (16, 48), (64, 320)])
    def test_common_prefix(self, page_size: int, common: int, device: torch.device) -> None:
        self.check_shared(self.shared([make_layer(6, 2, 24, 16)], common, page_size=page_size, device=device))

    @capability("shared_prefix")
    @torch.inference_mode()
    def test_common_prefix_or_not(self, device: torch.device) -> None:
        """The answer is what it is without, but for rounding; and again in the next batch."""
        rig = self.shared([make_layer(9, 3)], 96, page_size=16, device=device)
        backend = self.make(rig)
        answers = []
        for common in (96, 0, 48, 96):
            batch = replace(rig.batch(backend), common_prefix=common)
            backend.prepare(batch)
            answers.append(backend.forward(rig.q[0], *rig.new_kv(), rig.layers[0], batch))
        for answer in answers[1:]:
            torch.testing.assert_close(answer, answers[0], rtol=0, atol=TOLERANCES[torch.float32])

    @capability("shared_prefix")
    def test_common_prefix_has_most_of_the_weight(self, device: torch.device) -> None:
        """Or next to none: what is put together are numbers of any size."""
        for request, loud in ((0, 20), (0, 50), (3, 32 + 1)):
            rig = self.shared([make_layer(2, 1)], 32, page_size=16, device=device)
            others = range(len(rig.lens)) if loud < 32 else (request,)
            for one in others:
                if loud < rig.lens[one]:
                    rig.k[0][one][loud] *= 8.0
                    if loud < rig.prefix[one]:
                        slot = rig.slots[0][one][loud : loud + 1]
                        rig.pool.put(0, slot, rig.k[0][one][loud : loud + 1], rig.v[0][one][loud : loud + 1])
            self.check_shared(rig)

    @capability("shared_prefix")
    @torch.inference_mode()
    def test_common_prefix_over_layers(self, device: torch.device) -> None:
        """With row tables of their own, windows and without, caps and scales."""
        layers = self.all_layers(window=20)
        rig = self.shared(layers, 32, page_size=16, device=device)
        backend = self.make(rig)
        batch = rig.batch(backend)
        backend.prepare(batch)
        for index, layer in enumerate(layers):
            sinks = make_sinks(layer, device)
            out = backend.forward(rig.q[index], *rig.new_kv(index), layer, batch, sinks=sinks)
            self.check(rig, out, index, sinks)

    @capability("shared_prefix")
    def test_common_prefix_of_one(self, device: torch.device) -> None:
        self.check_shared(self.shared([make_layer()], 16, ((3, 1),), page_size=16, device=device))

    @pytest.mark.full
    @capability("shared_prefix")
    @pytest.mark.parametrize(("paging", "shape", "window", "cap", "sinks", "dtype", "kept"), _CASES, ids=str)
    def test_common_prefix_matrix(
        self,
        paging: tuple[int, int],
        shape: tuple[int, int, int, int],
        window: int | None,
        cap: float | None,
        sinks: bool,
        dtype: torch.dtype,
        kept: torch.dtype | None,
        device: torch.device,
    ) -> None:
        layer = self.layer_of(shape, window, cap, sinks)
        page_size, common = paging
        kept = kept if self.has("kv_fp8") else None
        rig = self.shared([layer], common, page_size=page_size, dtype=dtype, kv_dtype=kept, device=device)
        self.check_shared(rig)

    @lacks("shared_prefix")
    def test_common_prefix_changes_nothing(self, device: torch.device) -> None:
        """A backend that does not know of it reads the prefix for each request."""
        self.check_shared(self.shared([make_layer()], 16, page_size=16, device=device))
