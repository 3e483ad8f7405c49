"""What goes to the device for a batch: one copy of ours, and the lists that FlashInfer copies by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from pegboard.conformance.attention.batches import CPU, AttentionRig, Lens, make_layer
from pegboard.core.interfaces.on_device import on_device
from pegboard.plugins.attn_flashinfer.options import FlashInferOptions
from tests.plugins.attn_flashinfer.fake_flashinfer import FakeFlashInfer
from tests.plugins.attn_flashinfer.imitated import CASCADE, Imitated

if TYPE_CHECKING:
    from pegboard.core.interfaces.on_device import HostArray

LAYERS = [make_layer(), make_layer(layer_id=1, window=20), make_layer(6, 3, 24, layer_id=2)]
"""Three kinds, two of which see the same keys."""

DECODES: Lens = ((40, 1), (33, 1), (70, 1))
MIXED: Lens = ((9, 1), (0, 12), (30, 1))


class Counting(FakeFlashInfer):
    """Counts the lists on the host that `plan` is given."""

    lists = 0

    def host(self, array: np.ndarray[tuple[int], np.dtype[np.int32]]) -> torch.Tensor:
        self.lists += 1
        return super().host(array)


class Counted(Imitated):
    library_type = Counting


@pytest.mark.parametrize(("lens", "common", "lists"), [(MIXED, 0, 5), (DECODES, 0, 5), (DECODES, 32, 9)])
def test_one_copy_of_ours(lens: Lens, common: int, lists: int) -> None:
    """Of all kinds of layers together. Lists: one of queries, and two for each set of keys that is seen, all of them or
    those in the window. A common prefix is a set of its own, with one more list of queries for each of its two kinds.
    """
    brought: list[int] = []

    def bring(*arrays: HostArray) -> tuple[torch.Tensor, ...]:
        brought.append(len(arrays))
        return on_device(CPU, None, arrays)

    rig = AttentionRig(LAYERS, lens, page_size=16, common=common)
    backend = Counted(FlashInferOptions.model_validate(CASCADE), replace(rig.context_for(), bring=bring))
    backend.prepare(rig.batch(backend))
    assert len(brought) == 1
    library = backend.library
    assert isinstance(library, Counting)
    assert library.lists == lists
