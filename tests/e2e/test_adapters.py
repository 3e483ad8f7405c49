"""Adapters in an engine: any mix in one batch gives the tokens that each gives alone."""

from __future__ import annotations

import itertools
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import Engine
from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.servers import Served, serving
from pegboard.core.engine.engine import GenerateOutput
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import ConfigError, InvalidRequest, ModelError
from pegboard.core.interfaces.sampling import SamplingParams
from tests.plugins.adapters.peft_files import agrees, merged, write_adapter

LENGTH = 24
NAMES = (None, *(f"a{number}" for number in range(8)))
PROMPTS = ([40, 41, 42, 43, 50, 51, 52, 53, 54] * 2, [70, 71, 40, 41, 90], list(range(100, 135)))
OTHERWISE: Mapping[str, Any] = {"attention": {"use": "torch"}, "runner": {"use": "layered"}}


class Models:
    """A tiny Llama, adapters for it, and the models that each makes of it."""

    def __init__(self, directory: Path) -> None:
        self.base = tiny_checkpoint(directory, "llama", num_hidden_layers=2)
        self.adapters = {
            name: write_adapter(
                directory / "adapters" / name, self.base, seed=seed, r=4 if seed % 2 else 8, lora_alpha=16
            )
            for seed, name in enumerate(NAMES)
            if name is not None
        }
        self.known: dict[str | None, torch.nn.Module] = {}

    def network(self, name: str | None) -> torch.nn.Module:
        if name not in self.known:
            rank = 4 if NAMES.index(name) % 2 else 8
            self.known[name] = merged(self.base, self.adapters.get(name or ""), lambda module: 16 / rank)
        return self.known[name]

    def config(self, names: Sequence[str], **sections: Any) -> dict[str, Any]:
        found: dict[str, Any] = {
            "model": {"path": str(self.base), "dtype": "float32", "served_name": "base"},
            "memory": {"max_total_tokens": 2048},
            **OTHERWISE,
            **{name: value for name, value in sections.items() if name != "adapters"},
        }
        preload = {name: str(self.adapters[name]) for name in names}
        found["adapters"] = {"preload": preload, **sections.get("adapters", {})}
        return found


@pytest.fixture(scope="module")
def models(checkpoints: Path) -> Models:
    return Models(checkpoints)


def request(prompt: Sequence[int], name: str | None, *, ignore_eos: bool = True) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=LENGTH, temperature=0.0, ignore_eos=ignore_eos)
    params = {} if name is None else {"adapter": name}
    return GenerateRequest(prompt=list(prompt), sampling=sampling, params=params)


def check(models: Models, asked: Sequence[tuple[Sequence[int], str | None]], found: Sequence[GenerateOutput]) -> None:
    """See that each answer is that of its adapter, as far as its reference is sure."""
    compared = 0
    for (prompt, name), output in zip(asked, found, strict=True):
        assert output.finish_reason["type"] in ("length", "stop"), output.finish_reason
        compared += agrees(models.network(name), prompt, output.token_ids)
    assert compared > 0.8 * LENGTH * len(asked)


ARRANGEMENTS = [
    {"loop": loop, "chunked_prefill_size": chunk, "mixed_chunk": mixed, "page_size": page, "slots": slots}
    for loop, chunk, mixed, page, slots in itertools.product(
        ("normal", "overlap"), (0, 16), (False, True), (1, 16), (3, 8)
    )
    if (chunk or not mixed) and (slots == 3 or page == 1)
]
SMALL = {"new_token_ratio": 0.05, "retract_lookahead": 0, "estimate_max_new_tokens": 4096}
"""Admits more requests than there is memory for."""


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=lambda one: "-".join(map(str, one.values())))
def test_base_and_eight_adapters_in_company(models: Models, arrangement: dict[str, Any]) -> None:
    """Memory is so small that requests are retracted."""
    given = {**SMALL, **arrangement}
    slots, page = given.pop("slots"), given.pop("page_size")
    memory = {"max_total_tokens": 320 if page == 16 else 160, "page_size": page}
    config = models.config([name for name in NAMES if name], scheduler=given, memory=memory, adapters={"slots": slots})
    asked = [(prompt, name) for prompt in PROMPTS for name in NAMES]
    with Engine.from_config(config) as engine:
        found = engine.run([request(prompt, name, ignore_eos=False) for prompt, name in asked])
        check(models, asked, found)
        assert engine.stats()["retractions"] or (page == 16 and given["mixed_chunk"]), "the pool was meant to be small"


@pytest.mark.parametrize("cache", ["radix", "block", "hiradix"])
def test_prefixes_are_found_within_an_adapter_and_nowhere_else(models: Models, cache: str) -> None:
    prompt = PROMPTS[0]
    with Engine.from_config(models.config(["a0", "a1"], prefix_cache={"use": cache})) as engine:
        cached = [engine.run([request(prompt, name)])[0].cached_tokens for name in ("a0", "a1", None, "a0", "a1", None)]
    assert cached == [0, 0, 0, *[len(prompt) - 1] * 3]


def test_names(models: Models) -> None:
    """The name of the model means an adapter, too; `params` say it first. An unknown one is refused."""
    with Engine.from_config(models.config(["a0", "a1"])) as engine:
        sampling = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
        for model, params, meant in (
            ("a0", {}, "a0"),
            ("base:a1", {}, "a1"),
            ("base", {}, None),
            ("", {}, None),
            ("a0", {"adapter": "a1"}, "a1"),
        ):
            asked = GenerateRequest(prompt=PROMPTS[1], sampling=sampling, model=model, params=params)
            assert agrees(models.network(meant), PROMPTS[1], engine.run([asked])[0].token_ids)
        for name in ("a2", "a", "a0 "):
            with pytest.raises(InvalidRequest, match="there is no adapter") as refused:
                engine.run([request(PROMPTS[1], name)])
            assert refused.value.status == 404
        for bad in (5, "", ["a0"], "x" * 300):
            with pytest.raises(InvalidRequest, match=r"params\.adapter must be"):
                engine.run([GenerateRequest(prompt=PROMPTS[1], sampling=sampling, params={"adapter": bad})])


def test_names_of_what_was_loaded_later(models: Models) -> None:
    """They never mean the model: not while it is loaded, nor for what is not there, nor for what has gone."""
    sampling = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
    directory = models.adapters["a0"].parent

    def asked(model: str) -> GenerateRequest:
        return GenerateRequest(prompt=PROMPTS[1], sampling=sampling, model=model)

    with Engine.from_config(models.config([], adapters={"directories": [str(directory)]})) as engine:
        for name in ("a2", "base:a3"):
            with pytest.raises(InvalidRequest, match="there is no adapter") as refused:
                engine.run([asked(name)])
            assert refused.value.status == 404
            plain = name.removeprefix("base:")
            engine.control("load_adapter", name=plain, path=str(models.adapters[plain]))
            assert agrees(models.network(plain), PROMPTS[1], engine.run([asked(name)])[0].token_ids)
        engine.control("unload_adapter", name="a2")
        with pytest.raises(InvalidRequest, match="there is no adapter"):
            engine.embed([PROMPTS[1]], model="a2")
        assert agrees(models.network(None), PROMPTS[1], engine.run([asked(str(models.base))])[0].token_ids)


def test_embeddings(models: Models) -> None:
    with Engine.from_config(models.config(["a0"])) as engine:
        own, other, again = (engine.embed([PROMPTS[0]], params=params) for params in ({}, {"adapter": "a0"}, {}))
    assert own[0].vector == pytest.approx(again[0].vector, abs=1e-5)
    assert other[0].vector != pytest.approx(own[0].vector, abs=1e-2)


def test_split_prefills(models: Models) -> None:
    """A prompt that is computed some layers at a time, while another adapter decodes between them."""
    config = models.config(["a0", "a1"], scheduler={"split_prefill_layers": 1, "mixed_chunk": False})
    with Engine.from_config(config) as engine:
        asked = [(PROMPTS[2], name) for name in ("a0", "a1", None)]
        check(models, asked, engine.run([request(prompt, name) for prompt, name in asked]))


def test_drafts(models: Models) -> None:
    """Tokens ahead are computed with the adapter of their request."""
    config = models.config(["a0", "a1"], speculation={"use": "ngram"})
    prompt = [60, 61, 62, 63] * 6
    with Engine.from_config(config) as engine:
        asked = [(prompt, name) for name in ("a0", None, "a1")]
        check(models, asked, engine.run([request(prompt, name) for prompt, name in asked]))


def test_the_native_runner_has_its_own_backend(models: Models) -> None:
    """Another one is refused, and so is its own with another runner. Its numbers are for tests/plugins/lora_native."""
    config = models.config(["a0"], runner={"use": "cpu_native"}, attention={})
    config["model"]["dtype"] = "bfloat16"
    with Engine.from_config(config) as engine:
        assert engine.info.providers["adapters"] == ["cpu_native"]
        [base, adapted] = engine.run([request(PROMPTS[0], name) for name in (None, "a0")])
        assert base.token_ids != adapted.token_ids
    config["adapters"]["use"] = "torch"
    with pytest.raises(ConfigError, match="the runner 'cpu_native' takes another backend's additions only"):
        Engine.from_config(config)
    with pytest.raises(ConfigError, match="it is for the runner 'cpu_native'"):
        Engine.from_config(models.config(["a0"], adapters={"use": "cpu_native"}))


def test_adapters_share_less_memory_than_they_take(models: Models) -> None:
    """Those that no request uses are let go of and read again, while requests wait for them."""
    nbytes = 4 * sum(file.stat().st_size for file in models.adapters["a0"].glob("*.safetensors"))
    section = {"slots": 2, "host_bytes": nbytes, "fair_after": 0.05}
    config = models.config([name for name in NAMES if name][:6], adapters=section)
    sampling = SamplingParams(max_new_tokens=5, temperature=0.0, ignore_eos=True)
    names = [NAMES[place % 7] for place in range(14)]
    with Engine.from_config(config) as engine:
        asked = [
            GenerateRequest(prompt=PROMPTS[1], sampling=sampling, params={"adapter": name} if name else {})
            for name in names
        ]
        for name, output in zip(names, engine.run(asked), strict=True):
            assert agrees(models.network(name), PROMPTS[1], output.token_ids)
        assert engine.stats()["adapter_evictions_total"] > 4


def test_a_damaged_adapter_stops_the_start(models: Models, tmp_path: Path) -> None:
    config = models.config([], adapters={"preload": {"bad": str(tmp_path)}})
    with pytest.raises(ModelError, match=r"adapters\.preload\.bad: .* has no adapter_config\.json"):
        Engine.from_config(config)


# ---- a server --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(models: Models) -> Iterator[Served]:
    directory = models.adapters["a0"].parent
    config = models.config(["a0", "a1"], adapters={"directories": [str(directory)], "slots": 2})
    with serving(config, env={**os.environ, "OMP_NUM_THREADS": "1"}) as server:
        yield server


def post(server: Served, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
    asked = urllib.request.Request(f"{server.address}{path}", json.dumps(body).encode())
    asked.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def completed(server: Served, model: str) -> list[int]:
    body = {"model": model, "prompt": PROMPTS[1], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    status, answer = post(server, "/v1/completions", {**body, "return_token_ids": True})
    assert status == 200, answer
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def test_over_http(models: Models, served: Served) -> None:
    for model, meant in (("base", None), ("a0", "a0"), ("base:a1", "a1")):
        assert agrees(models.network(meant), PROMPTS[1], completed(served, model))
    options = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": [PROMPTS[1]] * 3, "lora_path": ["a1", None, "a0"], "sampling_params": options}
    status, answers = post(served, "/generate", body)
    assert status == 200, answers
    for answer, meant in zip(answers, ("a1", None, "a0"), strict=True):
        assert agrees(models.network(meant), PROMPTS[1], answer["output_ids"])
    said = {"max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    texts = {model: post(served, "/v1/messages", {"model": model, **said})[1]["content"] for model in ("base", "a0")}
    assert texts["base"] != texts["a0"]
    with urllib.request.urlopen(f"{served.address}/v1/models", timeout=60) as answer:
        cards = {card["id"]: card for card in json.loads(answer.read())["data"]}
    assert {name: card["parent"] for name, card in cards.items()} == {"base": None, "a0": "base", "a1": "base"}
    assert cards["a1"]["root"] == str(models.adapters["a1"])


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_loading_and_unloading(models: Models, served: Served, prefix: str) -> None:
    load, unload = f"{prefix}/load_lora_adapter", f"{prefix}/unload_lora_adapter"
    assert post(served, "/v1/completions", {"model": "a5", "prompt": "x"})[0] == 404
    path = str(models.adapters["a5"])
    status, answer = post(served, load, {"lora_name": "a5", "lora_path": path})
    assert (status, answer["loaded_adapters"]["a5"]) == (200, path)
    assert agrees(models.network("a5"), PROMPTS[1], completed(served, "a5"))
    assert post(served, load, {"lora_name": "a5", "lora_path": path})[0] == 409
    # Another one under the same name.
    status, _ = post(served, load, {"lora_name": "a5", "lora_path": str(models.adapters["a6"]), "replace": True})
    assert status == 200
    assert agrees(models.network("a6"), PROMPTS[1], completed(served, "a5"))
    assert post(served, unload, {"lora_name": "a5"})[0] == 200
    assert post(served, unload, {"lora_name": "a5"})[0] == 404
    for model in ("a5", "base:a5"):
        assert post(served, "/v1/completions", {"model": model, "prompt": "x"})[0] == 404
    assert post(served, "/generate", {"text": "x", "lora_path": "a5"})[0] == 404


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"lora_name": "x", "lora_path": "/etc"}, "lora_path", "not below adapters.directories"),
        ({"lora_name": "x", "lora_path": "{adapters}/../.."}, "lora_path", "not below adapters.directories"),
        ({"lora_name": "x", "lora_path": "{adapters}/none"}, "lora_path", "not a directory"),
        ({"lora_name": "x", "lora_path": "{adapters}"}, "lora_path", "no adapter_config.json"),
        ({"lora_name": "base", "lora_path": "{adapters}/a0"}, "lora_name", "the model's own name"),
        ({"lora_name": "a:b", "lora_path": "{adapters}/a0"}, "lora_name", ""),
        ({"lora_name": "", "lora_path": "{adapters}/a0"}, "lora_name", ""),
        ({"lora_name": "x"}, "lora_path", ""),
    ],
)
def test_bad_loads(models: Models, served: Served, body: dict[str, str], param: str, message: str) -> None:
    """Nothing has changed, and the name may be tried again."""
    directory = str(models.adapters["a0"].parent)
    status, answer = post(
        served, "/load_lora_adapter", {k: v.replace("{adapters}", directory) for k, v in body.items()}
    )
    assert (status, answer["error"]["param"]) == (400, param)
    assert message in answer["error"]["message"]
    assert post(served, "/v1/completions", {"model": "x", "prompt": "x"})[0] == 404
