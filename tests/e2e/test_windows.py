"""Window layers with pages of their own, in whole engines: answers and logits are transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.config.compose import compose
from pegboard.core.engine.engine import Engine, GenerateOutput
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.interfaces.sampling import SamplingParams
from tests.e2e.disagg_pair import pair
from tests.plugins.spec_eagle.heads import Head
from tests.tools.families import NEAR_TIE, build
from tests.tools.family_configs import FAMILIES

NEW, PAGE = 40, 4
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=NEW)
SHARED = [(11 * step) % 480 + 3 for step in range(45)]
PROMPTS = [
    [*SHARED[: 24 * (number % 2)], *((7 * step + 31 * number) % 480 + 3 for step in range(9 + 3 * number))]
    for number in range(10)
]
TOLERANCE = 2e-3
"""Of a log probability: logits of these models reach 30, and float32 sums in another order differ by 1e-5 of that."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For models as tiny as these, threads of torch cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def settings(path: Path, **more: Any) -> dict[str, Any]:
    """So little memory that requests are retracted."""
    memory = {"page_size": PAGE, "max_total_tokens": 192, "typical_length": 40, "window_pages": True}
    scheduler = {"chunked_prefill_size": 16, "new_token_ratio": 0.1, "retract_lookahead": 1}
    return {
        "model": {"path": str(path), "dtype": "float32", "device": "cpu", "context_length": 160},
        "attention": {"use": "torch"},
        "runner": {"use": "layered"},
        "log_level": "error",
        **more,
        "memory": {**memory, **more.get("memory", {})},
        "scheduler": {**scheduler, **more.get("scheduler", {})},
    }


def ask(data: dict[str, Any]) -> tuple[list[GenerateOutput], dict[str, Any]]:
    with Engine.from_config(data) as engine:
        # Twice, so that the second time prefixes of all of them are cached, as far as memory goes.
        requests = [GenerateRequest(prompt=prompt, sampling=GREEDY, logprobs=5) for prompt in PROMPTS]
        found = [*engine.run(requests), *engine.run(requests)]
        while engine.built.scheduler.busy:
            engine.built.scheduler.step()
        assert engine.built.scheduler.counters.book_errors == 0
        return found, engine.stats()


@torch.inference_mode()
def check(found: list[GenerateOutput], directory: Path, architecture: str) -> None:
    """Tokens and log probabilities against one pass of transformers over each text."""
    model = getattr(transformers, architecture).from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    for prompt, output in zip(PROMPTS * 2, found, strict=True):
        text = [*prompt, *output.token_ids]
        logits = model.eval()(input_ids=torch.tensor([text]), use_cache=False).logits[0].float()
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        assert output.logprobs is not None
        assert len(output.logprobs) == len(output.token_ids) > 0
        for row, (_, token, tops) in zip(expected, output.logprobs, strict=True):
            assert float(row.max() - row[token]) < NEAR_TIE
            for logprob, other in tops:
                assert abs(logprob - float(row[other])) < TOLERANCE


def families(*names: str) -> list[Any]:
    """All names, the first in each run of the tests."""
    return [pytest.param(name, marks=[pytest.mark.full] if place else []) for place, name in enumerate(names)]


@pytest.mark.parametrize("loop", ["overlap", pytest.param("normal", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "family", families("gemma3_text", "gemma2", "gpt_oss", "olmo3", "cohere2", "mistral", "llama4_text")
)
def test_answers_are_those_of_transformers(family: str, loop: str, tmp_path: Path) -> None:
    architecture = build(FAMILIES[family], tmp_path)
    found, stats = ask(settings(tmp_path, scheduler={"loop": loop}))
    check(found, tmp_path, architecture)
    assert stats["retractions"] > 0
    assert stats["resumed_windows_total"] > 0
    assert stats["window_pages"] * PAGE < sum(map(len, PROMPTS)) / 2, "it could hold all"
    without, _ = ask(settings(tmp_path, memory={"window_pages": False}, scheduler={"loop": loop}))
    check(without, tmp_path, architecture)


OTHER = {
    "parts": {"split_prefill_layers": 1, "loop": "overlap"},
    "mixed": {"mixed_chunk": True, "chunked_prefill_size": 0},
}


@pytest.mark.full
@pytest.mark.parametrize("name", OTHER)
def test_in_other_settings(name: str, tmp_path: Path) -> None:
    architecture = build(FAMILIES["gemma3_text"], tmp_path)
    found, _ = ask(settings(tmp_path, scheduler=OTHER[name]))
    check(found, tmp_path, architecture)


@pytest.mark.full
def test_in_eight_bits(tmp_path: Path) -> None:
    """What is rounded is the same, whichever page it is in."""
    build(FAMILIES["gemma3_text"], tmp_path)
    found, without = (
        ask(settings(tmp_path, memory={"window_pages": on, "kv_dtype": "fp8_e4m3"}))[0] for on in (True, False)
    )
    assert [one.token_ids for one in found] == [one.token_ids for one in without]


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"speculation": {"use": "ngram"}}, "speculation excludes memory.window_pages"),
        (
            {"prefix_cache": {"use": "hiradix"}, "memory": {"host": {"max_total_tokens": 2048}}},
            "prefix_cache.use: keeps KV beyond the device, which memory.window_pages excludes",
        ),
        (
            {"runner": {"use": "cpu_native"}, "attention": {"use": "auto"}, "model": {"dtype": "bfloat16"}},
            "memory.window_pages: the runner 'cpu_native' reads keys and values itself",
        ),
        ({"parallel": {"tensor": 2}}, "the stage 'windows' computes beside the model"),
    ],
    ids=["speculation", "tiers", "native", "ranks"],
)
def test_refused(changes: dict[str, dict[str, Any]], reason: str, checkpoints: Path) -> None:
    """By name, with what to change."""
    data = settings(tiny_checkpoint(checkpoints, "mistral", sliding_window=16))
    for section, values in changes.items():
        data[section] = {**data.get(section, {}), **values}
    with pytest.raises(ConfigError, match=reason):
        Engine(compose(data=data, env={}))


def test_drafts_on_the_device_are_refused(checkpoints: Path, tmp_path: Path) -> None:
    """A step of theirs behind a cached prefix would be lost, since it looks back (`lookback`)."""
    data = settings(tiny_checkpoint(checkpoints, "mistral", sliding_window=16))
    data["speculation"] = {"use": "eagle", "draft": str(Head().write(tmp_path))}
    with pytest.raises(ConfigError, match=r"speculation\.use: speculation excludes memory\.window_pages"):
        Engine(compose(data=data, env={}))


def test_disaggregation_is_refused(checkpoints: Path) -> None:
    data = settings(tiny_checkpoint(checkpoints, "mistral", sliding_window=16))
    with pytest.raises(ConfigError, match="no KV comes from elsewhere"), pair(data, data):
        pass
