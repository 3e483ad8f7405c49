"""How much a decode step of models through the family transformers launches in a layer.

Counted as `benchmarks.launches` does, twice: with transformers' own modules, and with those parts replaced that the
family replaces (linear layers of one input in one product, norms and gated MLPs by their kernels). Attention and
experts are ours in both. Fails where a layer launches more than `MODELS` says.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.launches import CONTEXT, META, SAMPLING, Rig
from pegboard.core.interfaces.layers import ModelSpec
from pegboard.core.interfaces.model_family import ModelContext, Network
from pegboard.plugins.model_transformers import bridge, experts
from pegboard.plugins.model_transformers.configs import config_of
from pegboard.plugins.model_transformers.network import TransformersNetwork
from pegboard.plugins.model_transformers.rope import hold_rope_still
from pegboard.plugins.model_transformers.trace import trace
from pegboard.toolkit.model.kv_groups import groups_of

_COMMON: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": CONTEXT,
    "sliding_window": 4096,
}
_EXPERTS: dict[str, Any] = {**_COMMON, "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts_per_tok": 4}
_SHARED = {"n_routed_experts": 64, "n_shared_experts": 1, "first_k_dense_replace": 0}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}


@dataclass(frozen=True)
class Family:
    """A config of transformers: its type and architecture, fields beside the common ones, and launches of a layer at
    most.
    """

    model_type: str
    architecture: str
    most: int
    fields: Mapping[str, Any]

    @property
    def config(self) -> dict[str, Any]:
        return {"model_type": self.model_type, "architectures": [f"{self.architecture}ForCausalLM"], **self.fields}


MODELS: dict[str, Family] = {
    "Llama": Family("llama", "Llama", 23, _COMMON),
    "GPT-NeoX": Family("gpt_neox", "GPTNeoX", 30, {**_COMMON, "num_key_value_heads": 32}),
    "OLMo 2": Family("olmo2", "Olmo2", 27, _COMMON),
    "Phi-3": Family("phi3", "Phi3", 29, {**_COMMON, "pad_token_id": 0}),
    "Gemma 2": Family("gemma2", "Gemma2", 26, _COMMON),
    "Gemma 3": Family("gemma3_text", "Gemma3", 30, _COMMON),
    "GLM-4": Family("glm4", "Glm4", 31, {**_COMMON, "pad_token_id": 0}),
    "Qwen3 MoE": Family("qwen3_moe", "Qwen3Moe", 34, {**_EXPERTS, "num_experts": 64}),
    "Mixtral": Family("mixtral", "Mixtral", 32, {**_EXPERTS, "num_local_experts": 8}),
    "GPT-OSS": Family("gpt_oss", "GptOss", 36, {**_EXPERTS, "num_local_experts": 32, "rope_parameters": _ROPE}),
    "GLM-4-MoE": Family("glm4_moe", "Glm4Moe", 53, {**_EXPERTS, **_SHARED}),
    "MiniMax-M2": Family("minimax_m2", "MiniMaxM2", 40, {**_EXPERTS, "num_local_experts": 64}),
}


class FamilyRig(Rig):
    """A worker with a model through transformers; `own`: with none of its parts replaced."""

    models: ClassVar[Mapping[str, Mapping[str, Any]]] = {name: family.config for name, family in MODELS.items()}

    def __init__(self, model: str, layers: int, batch: int, *, own: bool) -> None:
        self._own = own
        super().__init__(model, layers, batch)

    def built(self, about: ModelContext) -> tuple[Network, ModelSpec]:
        found = trace(about.hf_config, CONTEXT, about.dtype)
        network = TransformersNetwork(_module(about), found)
        while self._own and network.replaced.give_up():
            pass
        groups = groups_of(found.layers)
        return network, ModelSpec(
            about.architecture, found.vocab_size, found.hidden_size, CONTEXT, found.layers, groups
        )


def _module(about: ModelContext) -> torch.nn.Module:
    """Return a model of transformers as the family has it, without memory."""
    from transformers import AutoModelForCausalLM

    bridge.register()
    experts.register()
    with torch.device(META):
        made: torch.nn.Module = AutoModelForCausalLM.from_config(
            config_of(about.hf_config),
            dtype=about.dtype,
            attn_implementation=bridge.PAGED,
            experts_implementation=experts.EXPERTS,
        )
    hold_rope_still(made)
    return made.eval().requires_grad_(False)


@dataclass(frozen=True, slots=True)
class Count:
    """Launches of a layer: by transformers' own modules, and with parts replaced."""

    model: str
    own: tuple[str, ...]
    replaced: tuple[str, ...]


def count(model: str, batch: int) -> Count:
    return Count(model, _layer(model, batch, own=True), _layer(model, batch, own=False))


def _layer(model: str, batch: int, *, own: bool) -> tuple[str, ...]:
    """Return what the second of two layers launches."""
    few, more = (FamilyRig(model, layers, batch, own=own).step(SAMPLING["greedy"]) for layers in (1, 2))
    # Both layers launch the same, so the first difference is where the second one begins, or some steps after that.
    start = next(place for place, (one, other) in enumerate(zip(few, more, strict=False)) if one != other)
    return tuple(more[start : start + len(more) - len(few)])


def problems(found: list[Count]) -> list[str]:
    """Return which layers launch more than they may."""
    return [
        f"{layer.model}: {len(layer.replaced)} launches a layer, {MODELS[layer.model].most} at most"
        for layer in found
        if len(layer.replaced) > MODELS[layer.model].most
    ]


def report(batch: int, names: bool, markdown: Path | None) -> None:
    """Count all models, print the table, and exit with what is too much."""
    found = [count(model, batch) for model in MODELS]
    lines = ["| model | a layer of transformers' modules | replaced |", "|---|---:|---:|"]
    lines += [f"| {layer.model} | {len(layer.own)} | {len(layer.replaced)} |" for layer in found]
    print("\n".join(lines))
    if names:
        for layer in found:
            print(f"\n{layer.model}\nown: {', '.join(layer.own)}\nreplaced: {', '.join(layer.replaced)}")
    if markdown is not None:
        markdown.write_text("\n".join(lines) + "\n")
    if wrong := problems(found):
        sys.exit("\n".join(wrong))
