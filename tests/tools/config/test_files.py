"""What `pegboard config check` says of a model: what a start refuses before it reads weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.cli.main import app
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.errors import ConfigError

NINE_HEADS: dict[str, Any] = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}


def check(model: Path, *settings: str, files: Sequence[Path] = ()) -> Any:
    options = [option for setting in (f"model.path={model}", *settings) for option in ("--set", setting)]
    return json.loads(CliRunner().invoke(app, ["config", "check", *map(str, files), *options, "--json"]).stdout)


def started(model: Path, config: dict[str, Any]) -> str:
    """The words with which a start refuses a config."""
    with pytest.raises(ConfigError) as caught:
        Engine.from_config({**config, "model": {**config.get("model", {}), "path": str(model)}})
    (problem,) = caught.value.problems
    return problem.message


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama")


def test_heads_that_ranks_cannot_share(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, "llama", **NINE_HEADS)
    assert check(model)["ok"]
    (problem,) = check(model, "parallel.tensor=2")["problems"]
    assert problem["path"] == "model.use"
    assert "dense: parallel.tensor: 9 query heads, 3 KV heads" in problem["message"]
    assert "do not divide by 2; tensor may be 1" in problem["message"]
    assert problem["message"] == started(model, {"parallel": {"tensor": 2}})


TOGETHER: dict[str, tuple[dict[str, Any], str, str]] = {
    "a runner": (
        {"runner": {"use": "cpu_native"}, "model": {"dtype": "float32"}},
        "runner.use",
        "it computes in bfloat16, and model.dtype is float32",
    ),
    "a stage": (
        {"adapters": {"preload": {"base": "/none"}}, "model": {"served_name": ["base"]}},
        "adapters.preload.base",
        "'base' is a name of the model itself; give the adapter another one",
    ),
    "ranks": (
        {"parallel": {"tensor": 2, "cores": 2}, "prefix_cache": {"use": "hiradix"}},
        "parallel.tensor",
        "the prefix cache 'hiradix' keeps KV beyond the device, which does not work on 2 ranks",
    ),
    "a format": (
        {"quantization": {"format": {"use": "fp8"}}},
        "quantization.format.use",
        "are not quantised, and nothing quantises them when they are read; set it to auto",
    ),
    "drafts": (
        {"parallel": {"tensor": 2, "cores": 2}, "speculation": {"use": "ngram"}},
        "parallel.tensor",
        "the stage 'speculation' brings tokens ahead, which does not work on 2 ranks; switch it off",
    ),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_what_does_not_work_together(plain: Path, tmp_path: Path, name: str) -> None:
    """What runner, stages and ranks refuse is refused in the words of a start."""
    config, path, says = TOGETHER[name]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    (problem,) = check(plain, files=[file])["problems"]
    assert problem["path"] == path
    assert says in problem["message"]
    assert problem["origin"].startswith(str(file))
    assert problem["message"] == started(plain, config)


def test_no_rank_is_started(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: object) -> None:
        raise AssertionError("it starts ranks")

    monkeypatch.setattr("pegboard.plugins.parallel.leader.Leader.start", start)
    assert check(plain, "parallel.tensor=2")["ok"]
    with pytest.raises(AssertionError, match="it starts ranks"):
        Engine.from_config({"model": {"path": str(plain)}, "parallel": {"tensor": 2}})


def test_of_a_gpu_only_the_family_is_asked(tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config for a GPU is checked where there is none, and takes no memory where there is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = check(plain, "model.device=cuda", "attention.use=triton")
    assert found["ok"]
    assert found["not_checked"][-1] == "whether attention, sampler, runner, stages and ranks take the model"
    (problem,) = check(tiny_checkpoint(tmp_path, "gpt_neox"), "model.device=cuda", "model.use=dense")["problems"]
    assert problem["path"] == "model.use"
    assert "GPTNeoXForCausalLM" in problem["message"]
    (problem,) = check(plain, "model.device=cuda", "quantization.format.use=fp8")["problems"]
    assert problem["path"] == "quantization.format.use"


def test_a_model_that_is_not_here_is_not_asked_about() -> None:
    assert check(Path("org/model"))["not_checked"][-1] == "whether providers take the model"
