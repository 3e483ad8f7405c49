"""The native runner on ranks, which are threads: as good as in one process, or refused by name."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tests.plugins.cpu_native.instruction_sets  # noqa: F401  skips where nothing can be compiled
from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.config.compose import ResolvedConfig, compose
from pegboard.core.engine.engine import Engine, GenerateOutput
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import ConfigError, ModelError
from pegboard.core.interfaces.sampling import SamplingParams
from tests.parallel.rank_threads import in_threads
from tests.plugins.quantization.published import WRITERS, published, tiny

LENGTH = 32
PROMPTS = 8
HERE = str(Path(__file__).parent)
SIZES: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 16, "intermediate_size": 132}


@pytest.fixture(scope="module")
def model(checkpoints: Path) -> Path:
    return tiny_checkpoint(checkpoints, "llama", hidden_size=96, num_hidden_layers=3, **SIZES)


def config(model: Path, **more: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "bfloat16", "device": "cpu"},
        "runner": {"use": "cpu_native", "threads": 1},
        "memory": {"max_total_tokens": 4096},
        "prefix_cache": {"use": "none"},
        "log_level": "error",
    }
    for key, value in more.items():
        base[key] = {**base.get(key, {}), **value}
    return base


def requests() -> list[GenerateRequest]:
    """Half of the answers are greedy, the others drawn with a seed; all with logprobs of prompts and answers."""
    draw, found = np.random.default_rng(4), []
    for number, length in enumerate((70, 33, 5, 150, 1, 300, 17, 64)):
        params = SamplingParams(
            temperature=float(number % 2), seed=number, max_new_tokens=LENGTH, ignore_eos=True, top_k=-1
        )
        ids = draw.integers(3, 320, size=length).tolist()
        found.append(GenerateRequest(prompt=ids, rid=f"r{number}", sampling=params, logprobs=2, logprob_start=0))
    return found


def answers(resolved: ResolvedConfig, *, plain: bool = False) -> list[GenerateOutput]:
    asked = requests()
    if plain:
        asked = [GenerateRequest(prompt=one.prompt, rid=one.rid, sampling=one.sampling) for one in asked]
    with Engine(resolved) as engine:
        assert engine.info.providers["runner"] == ["cpu_native"]
        found = engine.run(asked)
        stats, memory = engine.stats(), engine.built.scheduler.components.memory
        assert memory.idle_error() is None
    assert stats["book_errors"] == stats["failed_batches"] == stats["aborted"] == 0
    return found


@lru_cache(maxsize=2)
def alone(model: Path) -> list[GenerateOutput]:
    return answers(compose(data=config(model), env={}))


def prompt_logprobs(output: GenerateOutput) -> torch.Tensor:
    assert output.input_logprobs is not None
    return torch.tensor([value for value, _, _ in output.input_logprobs[1:]])


@lru_cache(maxsize=2)
def exact(model: Path) -> list[torch.Tensor]:
    """Return transformers' logprobs of the prompts in float32."""
    from transformers import AutoModelForCausalLM

    reference, found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), []
    for one in requests():
        assert isinstance(one.prompt, list)
        ids = torch.tensor(one.prompt)
        with torch.inference_mode():
            table = reference(ids[None]).logits[0, :-1].log_softmax(-1)
        found.append(table.gather(1, ids[1:, None]).squeeze(1))
    return found


ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "whole": {"scheduler": {"loop": "normal", "chunked_prefill_size": 0}},
    "chunks": {"scheduler": {"loop": "normal", "chunked_prefill_size": 32, "mixed_chunk": False}},
    "mixed": {"scheduler": {"loop": "overlap", "chunked_prefill_size": 32}, "memory": {"page_size": 16}},
    "overlap": {"scheduler": {"loop": "overlap", "chunked_prefill_size": 48, "mixed_chunk": False}},
}


@pytest.mark.parametrize(
    ("tensor", "arrangement"),
    [(2, "mixed"), (3, "chunks"), *(pytest.param(2, one, marks=pytest.mark.full) for one in ("whole", "overlap"))],
)
def test_as_good_as_one_process(model: Path, tensor: int, arrangement: str) -> None:
    """Logprobs of prompts are off by as much as those of one process. Answers leave its answers only where two tokens
    are closer to each other than twice the largest error of a logprob there.
    """
    found = answers(in_threads(config(model, **ARRANGEMENTS[arrangement]), tensor))
    right = torch.cat(exact(model))
    own = torch.cat([prompt_logprobs(one) for one in alone(model)]) - right
    ours = torch.cat([prompt_logprobs(one) for one in found]) - right
    assert float(ours.square().mean().sqrt()) <= 1.2 * float(own.square().mean().sqrt())
    noise = 2 * float(torch.cat([own, ours]).abs().max())
    compared = 0
    for greedy, other in list(zip(found, alone(model), strict=True))[::2]:
        assert greedy.logprobs is not None
        assert other.logprobs is not None
        for (value, token, _), (theirs, same, top) in zip(greedy.logprobs, other.logprobs, strict=True):
            if token != same:
                assert top is not None
                first, second = sorted((logprob for logprob, *_ in top), reverse=True)[:2]
                assert first - second <= noise, f"{token} instead of {same}, which is {first - second:.3f} ahead"
                break
            assert abs(value - theirs) <= noise
            compared += 1
    assert compared >= LENGTH, "answers part too early for a comparison"


def test_draws_are_those_of_the_logits(model: Path) -> None:
    """Whether logprobs are asked for or not."""
    resolved = in_threads(config(model, **ARRANGEMENTS["mixed"]), 2)
    with_logprobs, plain = answers(resolved), answers(resolved, plain=True)
    same = [one.token_ids == other.token_ids for one, other in zip(with_logprobs, plain, strict=True)]
    assert sum(same) >= PROMPTS - 2, "batches differ a little in time, and with them the order of sums"


@pytest.mark.parametrize(
    ("settings", "more", "parallel", "said"),
    [
        ({}, {}, {"tensor": 4}, "do not divide by 4; tensor may be 1, 2, 3 or 6"),
        ({}, {}, {"tensor": 2, "communicator": {"use": "gloo"}}, "set parallel.communicator.use to shm"),
        ({}, {}, {"tensor": 1, "pipeline": 2}, "each of its ranks computes all layers, and parallel.pipeline is 2"),
        ({}, {"speculation": {"use": "ngram"}}, {"tensor": 2}, "brings tokens ahead, which does not work on 2 ranks"),
        ({}, {"adapters": {"directories": [HERE]}}, {"tensor": 2}, "which does not work on 2 ranks"),
        ({"architecture": "qwen3_moe"}, {}, {"tensor": 2}, "it does not cut experts for ranks"),
    ],
    ids=["sizes", "gloo", "sections", "speculation", "adapters", "experts"],
)
def test_what_does_not_work_is_refused(
    checkpoints: Path, model: Path, settings: dict[str, Any], more: dict[str, Any], parallel: dict[str, Any], said: str
) -> None:
    """Before weights are read, and before any rank is started."""
    directory = tiny_checkpoint(checkpoints, settings["architecture"]) if settings else model
    with pytest.raises((ConfigError, ModelError)) as caught:
        Engine(in_threads(config(directory, **more), **parallel))
    assert said in str(caught.value)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    coded, _ = published(tmp_path / "coded", tiny(tmp_path / "plain", "llama", intermediate_size=192), WRITERS["awq"])
    with pytest.raises(ConfigError, match="it does not cut quantised weights for ranks"):
        Engine(in_threads(config(coded), 2))
