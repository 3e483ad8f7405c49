"""The networks in kernels, interpreted: as in torch, to rounding, whatever a batch brings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from pegboard.conformance.attention.batches import ScaledPool
from pegboard.conformance.model_family import ModelFamilyContract
from pegboard.conformance.rig.model_references import context, model_checkpoint
from pegboard.conformance.rig.paged import PagedRun
from pegboard.core.interfaces.attention import AttentionContext
from pegboard.core.interfaces.forward import EmbedOverlay, Taps
from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.core.interfaces.layers import ModelSpec
from pegboard.core.interfaces.model_family import Network
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.attn_torch.backend import TorchAttention
from pegboard.plugins.model_dense.family import DenseFamily
from pegboard.plugins.model_dense.options import DenseOptions
from pegboard.toolkit import kernels
from pegboard.toolkit.kernels.launch import Launch, observed

STEPS: Sequence[Mapping[int, Sequence[int]]] = ({0: [5, 6, 7, 8], 1: [9, 3]}, {0: [4], 1: [8, 2]}, {1: [11], 0: [7]})
"""A prompt beside another, a mixed batch, and a decode."""

CPU = torch.device("cpu")

Found = tuple[list[torch.Tensor], list[torch.Tensor], list[str]]


def eight_bit_run(network: Network, spec: ModelSpec) -> PagedRun:
    """A run over a pool of 8 bits."""
    about = AttentionContext(spec.layers, 4, torch.float32, CPU, 2, 64, kv_dtype=torch.float8_e4m3fn)
    paged = PagedRun(network, spec, attention=TorchAttention(NoOptions(), about), requests=2, length=16)
    paged.pool = ScaledPool(None, KVPoolContext(8, 4, spec.layers, torch.float8_e4m3fn, CPU))
    return paged


def run(checkpoint: Path, fused: bool, *, overlay: bool = False, eight_bit: bool = False) -> Found:
    """Hidden states and taps of each step, K and V of all layers in the end, and the kernels that ran."""
    family = DenseFamily(DenseOptions(packed="off"), context(checkpoint))
    network, spec = family.load(), family.spec
    paged = eight_bit_run(network, spec) if eight_bit else PagedRun(network, spec, requests=2, length=16)
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
    kept = [one(layer.layer_id).float().nan_to_num() for layer in spec.layers for one in (pool.keys, pool.values)]
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


@pytest.mark.usefixtures("interpreted_triton")
def test_as_in_torch_over_eight_bits(tmp_path: Path) -> None:
    """Queries and keys by a Hadamard matrix on both ways: of the same states come the same numbers, but for some that
    are near the middle of two. The states of a layer above see what that comes to.
    """
    checkpoint = model_checkpoint(tmp_path, "qwen3")
    expected, got = (run(checkpoint, fused, eight_bit=True) for fused in (False, True))
    assert "qk_norm_rope_store_kernel" in got[2]
    (keys, values), (kept_keys, kept_values) = got[1][:2], expected[1][:2]
    assert (keys != kept_keys).sum() + (values != kept_values).sum() <= 2
    for one, other in zip(got[0], expected[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3 * float(other.abs().max()))


@pytest.mark.full
class TestInKernels(ModelFamilyContract):
    """The suite, which runs each test with prompts long enough to take their time in the interpreter."""

    provider = "dense"
    architectures = ("qwen3",)

    @pytest.fixture(autouse=True)
    def _in_kernels(self, interpreted_triton: None) -> Iterator[None]:
        with kernels.allowed("cpu"):
            yield
