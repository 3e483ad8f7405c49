"""Weights that are replaced while an engine serves: answers come from exactly one set of them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pegboard import Engine
from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.rig.other_weights import another, other_weights, tensors_of
from pegboard.core.engine.engine import GenerateOutput
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import ControlReply, ControlRequest
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.plugins.weight_updates.source import FileSource, MemorySource

PROMPTS = ([40, 41, 42, 43, 50, 51, 52, 53, 54] * 2, [70, 71, 40, 41, 90], list(range(100, 135)))
LENGTH = 16

ARRANGEMENTS: Mapping[str, dict[str, Any]] = {
    "dense": {"model": {"use": "dense", "dtype": "float32"}, "runner": {"use": "layered"}},
    "transformers": {"model": {"use": "transformers", "dtype": "float32"}, "runner": {"use": "layered"}},
    "packed": {"model": {"use": "dense", "dtype": "bfloat16", "packed": "auto"}, "runner": {"use": "layered"}},
    "unpacked": {"model": {"use": "dense", "dtype": "bfloat16", "packed": "off"}, "runner": {"use": "layered"}},
    "native": {"model": {"dtype": "bfloat16"}, "runner": {"use": "cpu_native"}},
}


@pytest.fixture(scope="module")
def base(checkpoints: Path) -> Path:
    return tiny_checkpoint(checkpoints, "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def other(base: Path) -> Path:
    return other_weights(base)


def config(path: Path, arrangement: str = "dense", **sections: Any) -> dict[str, Any]:
    found = {name: dict(section) for name, section in ARRANGEMENTS[arrangement].items()}
    found["model"]["path"] = str(path)
    updates = {"enabled": True, "directories": [str(path.parent)]}
    return {**found, "memory": {"max_total_tokens": 2048}, "weight_updates": updates, **sections}


def request(prompt: Sequence[int], length: int = LENGTH) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=length, temperature=0.0, ignore_eos=True)
    return GenerateRequest(prompt=list(prompt), sampling=sampling, stream=True)


def answers(engine: Engine) -> list[GenerateOutput]:
    return engine.run([request(prompt) for prompt in PROMPTS])


def tokens_of(engine: Engine) -> list[list[int]]:
    return [one.token_ids for one in answers(engine)]


def fresh(path: Path, arrangement: str = "dense") -> list[list[int]]:
    with Engine.from_config(config(path, arrangement)) as engine:
        return tokens_of(engine)


def refused(engine: Engine, action: str = "update_weights", **args: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        engine.control(action, **args)
    return raised.value


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_tokens_are_those_of_a_fresh_start(base: Path, other: Path, arrangement: str) -> None:
    """From disk, and back again from tensors. Nothing that was cached is found, and each answer tells its version."""
    wanted = {path: fresh(path, arrangement) for path in (base, other)}
    assert wanted[base] != wanted[other]
    with Engine.from_config(config(base, arrangement)) as engine:
        assert tokens_of(engine) == wanted[base]
        assert engine.control("update_weights", path=str(other), weight_version="v2")["weight_version"] == "v2"
        found = answers(engine)
        assert [one.token_ids for one in found] == wanted[other]
        assert [one.cached_tokens for one in found] == [0] * len(PROMPTS)
        assert [one.extra for one in found] == [{"weight_version": "v2"}] * len(PROMPTS)
        assert all(one.cached_tokens for one in answers(engine)), "prefixes of the new weights are found"
        assert engine.control("update_weights", tensors=tensors_of(base))["weight_version"] == "2"
        found = answers(engine)
        assert [one.token_ids for one in found] == wanted[base]
        assert [one.cached_tokens for one in found] == [0] * len(PROMPTS)
        assert engine.stats()["book_errors"] == 0
