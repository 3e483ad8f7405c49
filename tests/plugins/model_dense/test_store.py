"""Weights of dense networks that are replaced where matrices are kept packed, and who lends none."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.rig.model_references import context, model_checkpoint, prompts
from pegboard.conformance.rig.other_weights import other_weights, tensors_of
from pegboard.conformance.rig.paged import PagedRun
from pegboard.core.interfaces.errors import Unsupported
from pegboard.plugins.model_dense import store as stores
from pegboard.plugins.model_dense.family import DenseFamily
from pegboard.plugins.model_dense.network import DenseNetwork
from pegboard.plugins.model_dense.options import DenseOptions
from pegboard.toolkit.model import layers, packed
from pegboard.toolkit.model.layers import FusedLinear
from pegboard.toolkit.model.packed import why_not_packed

pytestmark = pytest.mark.skipif(
    why_not_packed(torch.bfloat16, torch.device("cpu")) is not None, reason="nothing is packed here"
)


def loaded(directory: Path) -> PagedRun:
    ctx = replace(context(directory), dtype=torch.bfloat16)
    family = DenseFamily(DenseOptions(packed="on"), ctx)
    return PagedRun(family.load(), family.spec, dtype=torch.bfloat16)


def logits(run: PagedRun, tokens: Sequence[int], row: int) -> torch.Tensor:
    return run.step({row: tokens})[row]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("released", [False, True])
def test_packed_matrices_are_replaced(tmp_path: Path, tied: bool, released: bool) -> None:
    """All, and then some parts of one: the same numbers as of a network that was loaded so."""
    base = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=2, tie_word_embeddings=tied)
    other = other_weights(base)
    run, prompt = loaded(base), prompts(base)[1]
    store = run.network.weights()
    if released:
        assert store.release() > 0
    store.begin(tensors_of(other))
    for name, tensor in sorted(tensors_of(other).items()):
        store.put(name, tensor)
    store.finish()
    assert torch.equal(logits(run, prompt, 0), logits(loaded(other), prompt, 0))
    parts = [
        "model.layers.1.self_attn.k_proj.weight",
        "model.embed_tokens.weight",
        *([] if tied else ["lm_head.weight"]),
    ]
    store.begin(parts)
    for name in parts:
        store.put(name, tensors_of(base)[name])
    store.finish()
    mixed = {**tensors_of(other), **{name: tensors_of(base)[name] for name in parts}}
    whole = Path(shutil.copytree(base, tmp_path / "mixed"))
    save_file(mixed, whole / "model.safetensors", {"format": "pt"})
    for name in parts:
        assert torch.equal(store.read(name, 50), tensors_of(base)[name].bfloat16().reshape(-1)[:50])
    for module in run.network.modules():  # type: ignore[attr-defined]
        assert not isinstance(module, FusedLinear) or module.packed
    assert torch.equal(logits(run, prompt, 1), logits(loaded(whole), prompt, 1))


def test_an_update_takes_little_beside_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tied embeddings the packed copy goes before the new one is made, and what packing frees goes to the system."""
    base = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=2, tie_word_embeddings=True)
    network = loaded(base).network
    assert isinstance(network, DenseNetwork)
    store, trimmed, alone = network.weights(), list[int](), list[bool]()
    head, pack = network.embedding, packed.pack
    assert head is not None

    def packs(weight: torch.Tensor) -> torch.Tensor:
        if weight is head.weight:
            alone.append(not head.packed)
        return pack(weight)

    monkeypatch.setattr(layers, "pack", packs)
    monkeypatch.setattr(stores, "trim", lambda: trimmed.append(1))
    monkeypatch.setattr(stores, "_TRIM_BYTES", 1)
    tensors = tensors_of(base)
    store.begin(tensors)
    for name, tensor in sorted(tensors.items()):
        store.put(name, tensor)
    assert len(trimmed) == 2 * 4, "after each matrix"
    store.finish()
    assert alone == [True]
    monkeypatch.setattr(stores, "_TRIM_BYTES", 2**40)
    name = "model.layers.0.self_attn.o_proj.weight"
    store.begin([name])
    store.put(name, tensors[name])
    store.finish()
    assert len(trimmed) == 2 * 4 + 1, "at the end in any case"
    assert alone == [True], "embeddings that stay are not packed again"


def test_reading_leaves_them_packed(tmp_path: Path) -> None:
    run = loaded(tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1))
    store, before = run.network.weights(), logits(run, [1, 2, 3], 0)
    for name, tensor in tensors_of(tmp_path / next(tmp_path.glob("llama*")).name).items():
        assert torch.equal(store.read(name, 10**9), tensor.bfloat16().reshape(-1))
    assert torch.equal(logits(run, [1, 2, 3], 1), before)


def test_a_tower_lends_none(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="the encoder of its pictures would keep its weights"):
        loaded(model_checkpoint(tmp_path, "qwen2_vl")).network.weights()
