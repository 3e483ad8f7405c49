"""FlashInfer itself, on a GPU, against attention written out and against its imitation."""

from __future__ import annotations

import pytest
import torch

from pegboard.conformance.attention import AttentionContract
from pegboard.conformance.attention.batches import AttentionRig, Lens, make_layer, make_sinks
from pegboard.conformance.attention.tree_rig import TreeRig
from pegboard.core.interfaces.forward import ForwardMode
from pegboard.core.interfaces.layers import LayerSpec
from pegboard.plugins.attn_flashinfer.backend import FlashInferAttention
from pegboard.plugins.attn_flashinfer.options import FlashInferOptions
from tests.plugins.attn_flashinfer.imitated import CASCADE, Imitated

pytestmark = pytest.mark.gpu

MIXED: Lens = ((0, 700), (500, 300), (1500, 1), (16, 1), (0, 17))
DECODES: Lens = ((3000, 1), (100, 1), (2047, 1), (15, 1))
LAYERS = {
    "plain": make_layer(32, 8, 128),
    "one group": make_layer(4, 4, 64),
    "large": make_layer(16, 8, 256),
    "window": make_layer(8, 2, 128, window=200),
    "all": make_layer(16, 2, 64, window=200, logit_cap=5.0, sinks=True, scale=0.2),
}


class TestOnGpu(AttentionContract):
    """What of the suite has heads that FlashInfer takes."""

    provider = "flashinfer"
    options = CASCADE


def backend_for(rig: AttentionRig) -> FlashInferAttention:
    options, ctx = FlashInferOptions(cascade=True), rig.context_for()
    reason = FlashInferAttention.supports(options, ctx)
    if reason is not None:
        pytest.skip(reason)
    return FlashInferAttention(options, ctx)


def check(rig: AttentionRig, layer: LayerSpec, mode: ForwardMode | None = None) -> None:
    """Compare with the imitation, over the same memory."""
    sinks = make_sinks(layer, rig.device)
    out = rig.run(backend_for(rig), mode=mode, sinks=sinks)
    expected = rig.run(
        Imitated(FlashInferOptions(cascade=True, workspace_mib=1), rig.context_for()), mode=mode, sinks=sinks
    )
    bound = 5e-3 if rig.dtype is torch.float16 else 4e-2
    torch.testing.assert_close(out.float(), expected.float(), rtol=0, atol=bound)


@pytest.mark.parametrize("kept", [None, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("lens", [MIXED, DECODES], ids=["mixed", "decode"])
@pytest.mark.parametrize("name", LAYERS)
def test_as_the_imitation(name: str, lens: Lens, page_size: int, kept: torch.dtype | None) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        layer, device = LAYERS[name], torch.device("cuda")
        check(AttentionRig([layer], lens, page_size=page_size, dtype=dtype, kv_dtype=kept, device=device), layer)


@pytest.mark.parametrize("name", LAYERS)
def test_trees_as_the_imitation(name: str) -> None:
    """More than one request, so that it shows where FlashInfer looks for the second one's mask."""
    layer, trees = LAYERS[name], ((-1, 0, 0, 1, 2), (), (-1, 0, 0))
    lens = ((170, 5), (90, 4), (333, 3))
    rig = TreeRig([layer], lens, trees, page_size=16, dtype=torch.float16, device=torch.device("cuda"))
    check(rig, layer, ForwardMode.MIXED)


def test_common_prefixes_as_the_imitation() -> None:
    layer = LAYERS["plain"]
    lens = [(512 + more, 1) for more in (0, 40, 3, 99)]
    rig = AttentionRig([layer], lens, page_size=16, dtype=torch.float16, device=torch.device("cuda"), common=512)
    check(rig, layer)
