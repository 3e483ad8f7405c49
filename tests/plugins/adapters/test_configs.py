"""Adapters as peft writes them, in many forms: what each adds is what its config says.

The reference is the model of transformers with scale * b @ a added to its weights, in float32, where each test says the
scale. A product of three matrices is off by 2.5 * 2^-24 of the product of their norms, which is below 1e-5 here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pegboard import Engine
from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.sampling import SamplingParams
from tests.plugins.adapters.peft_files import logprobs_of, merged, write_adapter

PROMPT = [*range(40, 64), 45, 46, 47]
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Form:
    """An adapter: fields of its config, and what they mean: `scale`, `ranks` and `modules` by a layer's name."""

    config: Mapping[str, Any] = field(default_factory=dict)
    scale: Callable[[str], float] = lambda name: 2.0
    ranks: Callable[[str], int] | None = None
    modules: Callable[[str], bool] | None = None


def last(*names: str) -> Callable[[str], bool]:
    return lambda name: name.rpartition(".")[2] in names


LINEAR = last("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FORMS: Mapping[str, Mapping[str, Form]] = {
    "llama": {
        "plain": Form(),
        "alpha": Form({"lora_alpha": 3, "r": 8}, lambda name: 3 / 8),
        "rslora": Form({"use_rslora": True, "r": 16}, lambda name: 8 / 4),
        "attention": Form({"target_modules": ["q_proj", "v_proj"]}),
        "mlp": Form({"target_modules": ["down_proj", "up_proj"]}),
        "all-linear": Form({"target_modules": "all-linear"}, modules=LINEAR),
        "regex": Form(
            {"target_modules": r".*\.(1|2)\.mlp\..*_proj"}, modules=lambda n: ".mlp." in n and ".0." not in n
        ),
        "excluded": Form(
            {"exclude_modules": ["o_proj", "gate_proj"]},
            modules=last("q_proj", "k_proj", "v_proj", "up_proj", "down_proj"),
        ),
        "excluded regex": Form({"exclude_modules": r".*layers\.0\..*"}, modules=lambda n: LINEAR(n) and ".0." not in n),
        "layers": Form({"layers_to_transform": [0, 2]}, modules=lambda n: LINEAR(n) and ".1." not in n),
        "layers of a pattern": Form(
            {"layers_to_transform": 1, "layers_pattern": "layers"}, modules=lambda n: LINEAR(n) and ".1." in n
        ),
        "rank pattern": Form(
            {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 8}}, lambda n: 8 / rank(n), lambda n: rank(n)
        ),
        "alpha pattern": Form(
            {"alpha_pattern": {"down_proj": 16, r"layers\.[01]\.self_attn\.v_proj": 4}}, lambda n: alpha(n) / 4
        ),
        "fan in": Form({"fan_in_fan_out": True}),
    },
    "qwen3": {"plain": Form(), "one": Form({"target_modules": ["k_proj"], "r": 1}, lambda name: 8.0)},
    "gpt_neox": {
        "plain": Form({"target_modules": ["query_key_value", "dense"]}),
        "all-linear": Form(
            {"target_modules": "all-linear", "r": 2}, lambda name: 4.0, modules=lambda name: ".layers." in name
        ),
    },
}


def rank(name: str) -> int:
    return 2 if name.endswith("q_proj") else 8 if name.endswith("layers.1.mlp.up_proj") else 4


def alpha(name: str) -> float:
    if name.endswith("down_proj"):
        return 16
    return 4 if name.endswith("v_proj") and ".2." not in name else 8


CASES = [(architecture, name) for architecture, forms in FORMS.items() for name in forms]


class Served:
    """An engine for each architecture, with an adapter of each form."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._engines: dict[str, Engine] = {}

    def models(self, architecture: str) -> tuple[Path, Mapping[str, Path]]:
        model = tiny_checkpoint(self._directory, architecture)
        folder = self._directory / f"{architecture}-adapters"
        return model, {name: folder / name.replace(" ", "-") for name in FORMS[architecture]}

    def engine(self, architecture: str) -> Engine:
        if architecture not in self._engines:
            model, adapters = self.models(architecture)
            for seed, (name, form) in enumerate(FORMS[architecture].items()):
                how = {"seed": seed, "ranks": form.ranks, "modules": form.modules, **form.config}
                write_adapter(adapters[name], model, **how)
            preload = {path.name: str(path) for path in adapters.values()}
            config = {
                "model": {"path": str(model), "dtype": "float32"},
                "memory": {"max_total_tokens": 2048},
                "attention": {"use": "torch"},
                "runner": {"use": "layered"},
                "adapters": {"preload": preload, "slots": 3},
            }
            self._engines[architecture] = Engine.from_config(config)
        return self._engines[architecture]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("forms"))
    yield made
    made.close()


@pytest.mark.parametrize(("architecture", "name"), CASES)
def test_logprobs_are_those_of_merged_weights(served: Served, architecture: str, name: str) -> None:
    """Of every token of the prompt's vocabulary after it, and not those of the base model."""
    engine, form = served.engine(architecture), FORMS[architecture][name]
    model, adapters = served.models(architecture)
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    wanted = tuple(range(0, 320, 7))
    asked = GenerateRequest(
        prompt=PROMPT, sampling=sampling, logprobs=20, token_ids_logprob=wanted, params={"adapter": adapters[name].name}
    )
    [output] = engine.run([asked])
    assert output.logprobs is not None
    found = {token: value for value, token in output.logprobs[0][2]}
    expected = logprobs_of(merged(model, adapters[name], form.scale), PROMPT)
    plain = logprobs_of(merged(model, None), PROMPT)
    assert len(found) >= len(wanted)
    assert max(abs(value - float(expected[token])) for token, value in found.items()) < TOLERANCE
    assert max(abs(value - float(plain[token])) for token, value in found.items()) > 100 * TOLERANCE
