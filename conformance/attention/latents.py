"""Tests of layers that keep a latent (MLA): one KV head, whose values are the first numbers of its keys."""

from __future__ import annotations

import math

import pytest
import torch

from pegboard.conformance.attention.base import DECODES, RAGGED, AttentionSuite
from pegboard.conformance.attention.batches import AttentionRig, Lens, make_layer, make_sinks
from pegboard.conformance.suite import capability
from pegboard.core.interfaces.forward import ForwardMode
from pegboard.core.interfaces.layers import LayerSpec

_LENS = pytest.mark.parametrize("lens", [RAGGED, DECODES, ((0, 6),)], ids=["ragged", "decode", "prompt"])

_SMALL = (20, 24, 16)
"""Heads, numbers of a latent with its part that has positions, and without."""

_MODELS = ((16, 576, 512), (20, 288, 256), (40, 288, 256), (128, 576, 512))
"""DeepSeek-V2-Lite, a short latent of GLM-4.7-Flash's heads, MiniCPM3, DeepSeek-V3."""


def make_latent(
    heads: int = 20, dim: int = 24, v_dim: int = 16, layer_id: int = 0, window: int | None = None
) -> LayerSpec:
    """Return a latent layer. Its scale is that of the keys before they were absorbed, which no size here tells."""
    return make_layer(heads, 1, dim, v_dim, layer_id=layer_id, scale=0.11, window=window, latent=True)


class AttentionLatentTests(AttentionSuite):
    """With the capability `latent`. The suite's pool keeps latents once, as pools do: values are a view of the keys."""

    @capability("latent")
    @pytest.mark.parametrize("page_size", [1, 16])
    @_LENS
    def test_latents(self, lens: Lens, page_size: int, device: torch.device) -> None:
        self.check_lens(make_latent(), lens, device, page_size=page_size)

    @capability("latent")
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    @_LENS
    def test_latents_in_half_precision(self, lens: Lens, dtype: torch.dtype, device: torch.device) -> None:
        rig = AttentionRig([make_latent(*_SMALL)], lens, dtype=dtype, device=device)
        self.check(rig, rig.run(self.make(rig)))

    @capability("latent")
    def test_latents_of_a_mixed_batch(self, device: torch.device) -> None:
        self.check_lens(make_latent(), RAGGED, device, mode=ForwardMode.MIXED)

    @capability("latent")
    @_LENS
    def test_latents_are_written_once(self, lens: Lens, device: torch.device) -> None:
        """Where `out_cache_loc` says, to the bit, and nowhere else; slots without an owner are not read."""
        outputs = []
        for poison in (math.nan, 1e4):
            rig = AttentionRig([make_latent()], lens, device=device, poison=poison)
            before, (k, _), slots = rig.pool.keys(0).clone(), rig.new_kv(), rig.new_slots()
            outputs.append(rig.run(self.make(rig)))
            before[slots] = k
            assert torch.equal(rig.pool.keys(0).nan_to_num(nan=-7.0), before.nan_to_num(nan=-7.0))
        assert torch.equal(*outputs), "slots that have no owner were read"

    @capability("latent")
    @_LENS
    def test_latents_beside_other_layers(self, lens: Lens, device: torch.device) -> None:
        layers = [make_latent(), make_layer(layer_id=1), make_latent(8, 40, 32, layer_id=2)]
        rig = AttentionRig(layers, lens, device=device)
        backend = self.make(rig)
        batch = rig.batch(backend)
        with torch.inference_mode():
            backend.prepare(batch)
            for index, layer in enumerate(layers):
                self.check(rig, backend.forward(rig.q[index], *rig.new_kv(index), layer, batch), index)

    @capability("latent")
    @capability("sliding_window")
    @capability("sinks")
    @_LENS
    def test_latents_with_windows_and_sinks(self, lens: Lens, device: torch.device) -> None:
        layer = make_layer(6, 1, 24, 16, window=5, sinks=True, latent=True)
        rig = AttentionRig([layer], lens, device=device)
        sinks = make_sinks(layer, device)
        self.check(rig, rig.run(self.make(rig), sinks=sinks), sinks=sinks)

    @capability("latent")
    @pytest.mark.full
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("sizes", _MODELS, ids=str)
    def test_latents_of_real_models(
        self, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        heads, dim, v_dim = sizes
        layer = make_layer(heads, 1, dim, v_dim, scale=0.06, latent=True)
        for lens in (((0, 35), (45, 20), (70, 1)), ((200, 1), (64, 1), (1, 1))):
            rig = AttentionRig([layer], lens, page_size=16, dtype=dtype, device=device)
            self.check(rig, rig.run(self.make(rig)))
