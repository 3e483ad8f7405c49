"""What holds where a request leaves sampling parameters open."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.config.compose import compose
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.errors import ConfigError, InvalidRequest, ModelError
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.toolkit.model.sampling_defaults import sampling_defaults

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 1}


@pytest.mark.parametrize(
    ("file", "setting", "found"),
    [
        (QWEN, "model", {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        (QWEN, "none", {}),
        (QWEN, {"temperature": 1, "min_p": 0.1}, {"temperature": 1.0, "top_p": 0.95, "top_k": 20, "min_p": 0.1}),
        ({"temperature": None, "top_k": 20.0}, "model", {"top_k": 20}),
        ({"do_sample": False, "top_p": 0.9, "repetition_penalty": 1.05}, "model",
         {"temperature": 0.0, "repetition_penalty": 1.05}),
        ({"do_sample": False}, {"temperature": 0.5}, {"temperature": 0.5}),
        ({"max_new_tokens": 64, "max_length": 20}, "model", {"max_new_tokens": 64}),
        ({"temperature": "hot"}, {"temperature": 0.5}, {"temperature": 0.5}),
        (None, "model", {}),
    ],
)  # fmt: skip
def test_what_the_file_and_the_config_say(
    tmp_path: Path, file: dict[str, Any] | None, setting: str | dict[str, float], found: dict[str, float]
) -> None:
    if file is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(file), "utf-8")
    defaults = sampling_defaults(setting, tmp_path)
    assert defaults == found
    assert all(type(value) is type(found[name]) for name, value in defaults.items())


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"top_k": [1]}, "top_k must be an integer"),
    ],
)
def test_a_file_that_cannot_be_honoured_is_named(tmp_path: Path, file: dict[str, Any], words: str) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(file), "utf-8")
    with pytest.raises(ModelError, match=words) as error:
        sampling_defaults("model", tmp_path)
    assert f"{tmp_path}/generation_config.json" in str(error.value)
    assert "set sampling_defaults to none" in str(error.value)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("auto", "must be model, none, or parameters such as"),
        ({"top_q": 1}, "there is no default for 'top_q'; did you mean 'top_p'"),
        ({"top_p": 2}, "top_p must be above 0 and at most 1, got 2"),
        ({"top_k": "20"}, "top_k must be an integer, got '20'"),
        ({"seed": 1}, "there is no default for 'seed'"),
        ({"top_p": None}, "top_p needs a value"),
    ],
)
def test_a_wrong_setting_is_known_before_the_model_is_read(setting: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        compose(data={"model": {"path": "x"}, "sampling_defaults": setting}, env={})
    assert error.value.problems[0].path == "sampling_defaults"


def test_layers_of_the_config_merge(tmp_path: Path) -> None:
    data = {"model": {"path": "x"}, "sampling_defaults": {"top_k": 5}}
    resolved = compose(data=data, overrides=["sampling_defaults.temperature=0.6"], env={})
    assert resolved.engine.sampling_defaults == {"top_k": 5, "temperature": 0.6}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A model whose authors say how to sample from it."""
    plain = tiny_checkpoint(tmp_path_factory.mktemp("checkpoints"), "llama", num_hidden_layers=1)
    directory = tmp_path_factory.mktemp("model")
    shutil.copytree(plain, directory, dirs_exist_ok=True)
    said = {"do_sample": True, "temperature": 0.01, "top_k": 1, "top_p": 0.1, "max_new_tokens": 6}
    (directory / "generation_config.json").write_text(json.dumps(said), "utf-8")
    data = {
        "model": {"path": str(directory), "dtype": "float32"},
        "attention": {"use": "torch"},
        "memory": {"max_total_tokens": 512},
    }
    with Engine(compose(data=data, env={})) as engine:
        yield engine


class TestEngine:
    """What callers of the engine pass."""

    def test_gaps_are_filled_and_full_parameters_are_taken_as_they_are(self, engine: Engine) -> None:
        assert engine.info.sampling_defaults == {"temperature": 0.01, "top_p": 0.1, "top_k": 1, "max_new_tokens": 6}
        prompt, seeds = [3, 4, 5], range(5)
        [greedy] = engine.generate([prompt], SamplingParams(temperature=0, max_new_tokens=6))
        asked = [{"seed": seed} for seed in seeds]
        assert {tuple(one.token_ids) for one in engine.generate([prompt] * 5, asked)} == {tuple(greedy.token_ids)}
        assert engine.generate(prompt).token_ids == greedy.token_ids
        stated = [SamplingParams(seed=seed, max_new_tokens=6) for seed in seeds]
        assert len({tuple(one.token_ids) for one in engine.generate([prompt] * 5, stated)}) > 1

    def test_prompts_are_taken_as_people_have_them(self, engine: Engine) -> None:
        ids, params = [3, 4, 5], {"temperature": 0, "max_new_tokens": 4}
        [expected] = engine.generate([ids], params)
        rows = np.array([ids, ids])
        singles: list[Any] = [ids, tuple(ids), np.array(ids)]
        for one in singles:
            assert engine.generate(one, params).token_ids == expected.token_ids
            streamed = [token for chunk in engine.stream(one, params) for token in chunk.token_ids]
            assert streamed == expected.token_ids
        lists: list[Any] = [rows, list(rows), [tuple(ids)] * 2, iter([ids, ids])]
        for several in lists:
            assert [one.token_ids for one in engine.generate(several, params)] == [expected.token_ids] * 2
        nothing: list[str] = []
        assert engine.generate(nothing, params) == []

    @pytest.mark.parametrize(
        ("prompt", "words"),
        [
            ({"prompt": "a"}, "a prompt is a text, a list of token ids, or a MediaPrompt, not dict"),
            (5, "not int"),
            (["a", 5], r"prompt\[1\] must be a text or a list of token ids, got 5"),
            ([[3, 1.5]], r"prompt\[0\]\[1\] must be an integer, got 1.5"),
            ([3, "a"], r"prompt\[1\] must be an integer, got 'a'"),
            (np.array([0.5]), r"prompt\[0\] must be an integer"),
        ],
    )
    def test_what_is_no_prompt_is_named(self, engine: Engine, prompt: Any, words: str) -> None:
        with pytest.raises(InvalidRequest, match=words) as error:
            engine.generate(prompt)
        assert error.value.param == "prompt"

    @pytest.mark.parametrize("sampling", ["greedy", 5, [5], [{}, {}]])
    def test_what_are_no_parameters_is_named(self, engine: Engine, sampling: Any) -> None:
        with pytest.raises(InvalidRequest, match="sampling") as error:
            engine.generate([3, 4, 5], sampling)
        assert error.value.param == "sampling"
