"""Adapters as peft writes them, with random numbers, and models into which they are merged, for reference."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": list(ALL)}


def write_adapter(
    directory: Path,
    model: Path,
    *,
    seed: int = 0,
    ranks: Callable[[str], int] | None = None,
    modules: Callable[[str], bool] | None = None,
    size: float = 0.15,
    **config: Any,
) -> Path:
    """Write an adapter for the linear layers of `model` whose names `modules` wants, by default those of
    `target_modules`. `ranks` says what `rank_pattern` means. Numbers are normal, with deviation `size`.
    """
    settings = {**CONFIG, **config}
    targets = settings["target_modules"]
    wanted = modules or (lambda name: isinstance(targets, list) and name.rpartition(".")[2] in targets)
    network = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(model))
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in network.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head" and name != "embed_out" and wanted(name):
            rank = settings["r"] if ranks is None else ranks(name)
            for half, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                numbers = torch.randn(shape, generator=draw) * size
                tensors[f"base_model.model.{name}.lora_{half}.weight"] = numbers
    write_files(directory, settings, tensors)
    return directory


def write_files(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the two files of an adapter."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(dict(tensors), directory / "adapter_model.safetensors")


def merged(model: Path, adapter: Path | None, scale: Callable[[str], float] = lambda name: 2.0) -> torch.nn.Module:
    """Return the model of transformers in float32 with w + scale * b @ a in the place of each w."""
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        tensors = load_file(adapter / "adapter_model.safetensors")
        for name in tensors:
            if ".lora_A." in name:
                module = name.removeprefix("base_model.model.").partition(".lora_A.")[0]
                delta = tensors[name.replace(".lora_A.", ".lora_B.")].double() @ tensors[name].double()
                weight = network.get_submodule(module).weight
                weight.data = (weight.data.double() + scale(module) * delta).float()
    return network.eval()


@torch.inference_mode()
def logprobs_of(network: torch.nn.Module, ids: Sequence[int]) -> torch.Tensor:
    """Return the log-probabilities float64 [vocab] of what a model of transformers writes after `ids`."""
    found: torch.Tensor = network(torch.tensor([list(ids)])).logits[0, -1].double().log_softmax(-1)
    return found


def agrees(network: torch.nn.Module, prompt: Sequence[int], tokens: Sequence[int], near_tie: float = 1e-3) -> int:
    """Return how many of `tokens` a greedy model of transformers writes after `prompt`. Where its two best are closer
    together than `near_tie`, either is right, and the comparison ends. Raises AssertionError for a wrong token.
    """
    ids = list(prompt)
    for count, token in enumerate(tokens):
        best = logprobs_of(network, ids).topk(2)
        if float(best.values[0] - best.values[1]) < near_tie:
            return count
        assert token == int(best.indices[0]), f"token {count} is {token}, not {int(best.indices[0])}"
        ids.append(token)
    return len(tokens)
