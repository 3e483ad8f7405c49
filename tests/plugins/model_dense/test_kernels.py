"""The networks in kernels, interpreted: as in torch, to rounding, whatever a batch brings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from pegboard.conformance.model_family import ModelFamilyContract
from pegboard.conformance.model_references import context, model_checkpoint
from pegboard.conformance.paged import PagedRun
from pegboard.core.interfaces.forward import EmbedOverlay, Taps
from pegboard.core.toolkit import kernels
from pegboard.core.toolkit.kernels.launch import Launch, observed
from pegboard.plugins.model_dense.family import DenseFamily
from pegboard.plugins.model_dense.options import DenseOptions

STEPS: Sequence[Mapping[int, Sequence[int]]] = ({0: [5, 6, 7, 8], 1: [9, 3]}, {0: [4], 1: [8, 2]}, {1: [11], 0: [7]})
"""A prompt beside another, a mixed batch, and a decode."""

Found = tuple[list[torch.Tensor], list[torch.Tensor], list[str]]


def run(checkpoint: Path, fused: bool, *, overlay: bool = False) -> Found:
    """Hidden states and taps of each step, K and V of all layers in the end, and the kernels that ran."""
    family = DenseFamily(DenseOptions(packed="off"), context(checkpoint))
    paged = PagedRun(family.load(), family.spec, requests=2, length=16)
    places = tuple(range(len(family.spec.layers) + 2))
    states: list[torch.Tensor] = []
    launched: list[str] = []

    def note(launch: Launch) -> bool:
        launched.append(str(getattr(launch.kernel, "__name__", "")))
        return True

    with kernels.allowed("cpu") if fused else nullcontext(), observed(note), torch.inference_mode():
        for at, new in enumerate(STEPS):
            batch = paged.batch(new, decode=at == 2)
            batch.taps = Taps(places)
            if overlay and at == 0:
                given = torch.randn(2, 2, family.spec.hidden_size, generator=torch.Generator().manual_seed(0))
                batch.overlay = EmbedOverlay(torch.tensor([1, 4]), given[0], (given[1],))
                batch.positions = torch.stack((batch.positions, batch.positions + 1, batch.positions * 2))
            paged.attention.prepare(batch)
            states.append(paged.network.forward(batch))
            states.append(batch.taps.joined())
    pool = paged.pool
    kept = [one(layer.layer_id).nan_to_num() for layer in family.spec.layers for one in (pool.keys, pool.values)]
    return states, kept, launched


@pytest.mark.usefixtures("interpreted_triton")
@pytest.mark.parametrize(
    ("architecture", "overlay"),
    [("qwen3", False), ("qwen3_vl", True)]
    + [pytest.param(name, False, marks=pytest.mark.full) for name in ("llama", "mistral", "qwen2", "qwen3_moe")],
)
def test_as_in_torch(architecture: str, overlay: bool, tmp_path: Path) -> None:
    """Float32 sums in another order, and one rounding where torch has several: about 1e-6 of the largest state."""
    checkpoint = model_checkpoint(tmp_path, architecture)
    expected, got = (run(checkpoint, fused, overlay=overlay) for fused in (False, True))
    assert not expected[2]
    assert {"add_rms_norm_kernel", "qk_norm_rope_store_kernel", "rotations_kernel"} <= set(got[2])
    for one, other in zip(got[0] + got[1], expected[0] + expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5 * float(other.abs().max()))


@pytest.mark.full
class TestInKernels(ModelFamilyContract):
    """The suite, which runs each test with prompts long enough to take their time in the interpreter."""

    provider = "dense"
    architectures = ("qwen3",)

    @pytest.fixture(autouse=True)
    def _in_kernels(self, interpreted_triton: None) -> Iterator[None]:
        with kernels.allowed("cpu"):
            yield
