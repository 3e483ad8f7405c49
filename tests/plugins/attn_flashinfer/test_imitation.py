"""The imitation is as strict as the original, and the backend works with it as it stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch

from pegboard.conformance.attention.batches import AttentionRig, Lens, make_layer
from pegboard.core.interfaces.errors import Unsupported
from pegboard.plugins.attn_flashinfer.backend import FlashInferAttention
from pegboard.plugins.attn_flashinfer.options import FlashInferOptions
from tests.plugins.attn_flashinfer.fake_flashinfer import FakeFlashInfer
from tests.plugins.attn_flashinfer.imitated import Imitated
from tests.plugins.attn_flashinfer.spoilt import Named, Spoilt

OPTIONS = FlashInferOptions(workspace_mib=1)


@pytest.mark.parametrize("heads", [(2, 2, 64), (8, 2, 128), (5, 1, 64)], ids=str)
@pytest.mark.parametrize("lens", [((0, 9), (20, 1)), ((40, 1), (3, 1))], ids=["mixed", "decode"])
def test_heads_and_types_of_the_original(lens: Lens, heads: tuple[int, int, int]) -> None:
    rig = AttentionRig([make_layer(*heads)], lens, page_size=16, dtype=torch.float16)
    assert FlashInferAttention.unfit(OPTIONS, rig.context_for()) is None
    out = rig.run(FlashInferAttention(OPTIONS, rig.context_for(), FakeFlashInfer()))
    torch.testing.assert_close(out.double(), rig.expected(), rtol=0, atol=5e-3)


class Noting(Spoilt):
    """Changes nothing, and keeps the kernels that wrappers of decodes and of prompts are made with."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[tuple[str, str]] = set()

    def make(self, arguments: Named) -> None:
        self.made.add(("decode" if "use_tensor_cores" in arguments else "prompt", arguments["backend"]))


@pytest.mark.parametrize("backend", ["fa2", "fa3", "auto"])
def test_decodes_run_fa2(backend: Literal["fa2", "fa3", "auto"]) -> None:
    """Eager ones and those of graphs, whatever kernels prompts run."""
    noting = Noting()
    for lens in (((40, 1), (3, 1)), ((0, 9), (20, 1))):
        rig = AttentionRig([make_layer(8, 2, 64)], lens, page_size=16, dtype=torch.float16)
        made = FlashInferAttention(FlashInferOptions(workspace_mib=1, backend=backend), rig.context_for(), noting)
        rig.run(made)
        batch = rig.batch(made)
        if batch.forward_mode.is_decode:
            made.prepare(replace(batch, fixed=True))
    assert noting.made == {("decode", "fa2"), ("prompt", backend)}


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def planned(
    *,
    heads: int = 2,
    dim: int = 64,
    graph: int = 0,
    lens: tuple[int, ...] = (5, 3),
    run: int | None = None,
    plan: bool = True,
    workspace: torch.Tensor | None = None,
) -> None:
    """Plan a decode of so many requests, one page each, and run it with `run` queries."""
    library = FakeFlashInfer()
    workspace = torch.zeros(64, dtype=torch.uint8) if workspace is None else workspace
    buffers = [torch.zeros(size, dtype=torch.int32) for size in (graph + 1, 8, graph)] if graph else [None] * 3
    made = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", graph > 0, False, *buffers)
    cache = torch.zeros(4, 8, 1, dim, dtype=torch.float16)
    query = torch.zeros(len(lens) if run is None else run, heads, dim, dtype=torch.float16)
    if plan:
        indptr = library.host(ints(*range(len(lens) + 1)))
        indices = torch.ones(len(lens), dtype=torch.int32)
        made.plan(indptr, indices, library.host(ints(*lens)), heads, 1, dim, 8, q_data_type=torch.float16)
    made.run(query, (cache, cache))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: planned(plan=False), "before run"),
        (lambda: planned(workspace=torch.ones(64, dtype=torch.uint8)), "zeros"),
        (lambda: planned(workspace=torch.zeros(65, dtype=torch.uint8)[1:]), "aligned"),
        (lambda: planned(lens=(5, 9)), "last_page_len"),
        (lambda: planned(lens=(5, 0)), "last_page_len"),
        (lambda: planned(run=3), "does not match"),
        (lambda: planned(dim=80), "no kernel"),
        (lambda: planned(heads=5), "group_size"),
        (lambda: planned(graph=3), "fixed in cudagraph mode"),
    ],
)
def test_what_it_refuses(call: Callable[[], None], says: str) -> None:
    planned()
    planned(graph=2)
    with pytest.raises((ValueError, RuntimeError), match=says):
        call()


def test_graphs_have_no_masks() -> None:
    rig = AttentionRig([make_layer()], ((9, 1),))
    backend = Imitated(OPTIONS, rig.context_for())
    with pytest.raises(Unsupported, match="tree_mask"):
        backend.prepare(replace(rig.batch(backend), fixed=True, tail_lens_cpu=np.array([2])))
