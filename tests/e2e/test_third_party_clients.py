"""Other authors' clients, in the versions that ``make clients`` installs, with one server of a taught tiny model.

Each program in ``third_party_clients`` asks its client for several things and tells what came; the tests hold that
against what the model was taught, or against transformers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pegboard.conformance.servers import Served
from pegboard.toolkit.text.tokenizer import Tokenizer
from tests.e2e.clients import TEMPLATE, assert_balanced, teach, tiny_model, tiny_server
from tests.e2e.third_party_clients import common, install
from tests.e2e.third_party_clients.common import CALLS, END, LESSONS, PERSON, THANKS, TURN, WELCOME

pytestmark = [pytest.mark.clients, pytest.mark.slow]

HERE = Path(__file__).parent / "third_party_clients"
PROGRAM_S = 300
APIS = ["responses", "chat"]
LOOPED = [CALLS, END]
OVERFLOWS = ["ContextOverflowError"] * 2

EXPECTED: dict[str, dict[str, Any]] = {
    "sdks": {
        "chat_parsed": PERSON,
        "chat_streamed_calls": CALLS,
        "responses_parsed": PERSON,
        "responses_loop": END,
        "messages_parsed": PERSON,
        "messages_forced_call": [["tool_use", "Person", PERSON]],
        "messages_tool_runner": END,
    },
    "openai-agents": {
        f"{api}_{name}": value
        for api in APIS
        for name, value in {
            "loop": [END, ["Rome", True]],
            "required": [PERSON, [True]],
            "streamed": [PERSON, [True], ["tool_called", "tool_output", "message_output_created"], PERSON],
            "typed_only": PERSON,
            "session": [WELCOME, 4],
        }.items()
    },
    "litellm": {
        "completion": [WELCOME] * 3,
        "streamed": [WELCOME] * 3,
        "tool_loop": [LOOPED] * 3,
        "streamed_calls": [CALLS] * 3,
        "forced_call": [PERSON] * 3,
        "typed": [PERSON] * 2,
        "responses": WELCOME,
        "too_long": ["ContextWindowExceededError"] * 3,
        "wrong_key": ["AuthenticationError"] * 3,
    },
    "langchain": {
        f"{model}_{name}": value
        for model in (*APIS, "anthropic")
        for name, value in {
            "invoke": WELCOME,
            "stream": WELCOME,
            "bind_tools": LOOPED,
            "json_schema": PERSON,
            "function_calling": PERSON,
            "too_long": OVERFLOWS,
        }.items()
    }
    | {"text_completion": WELCOME},
    "ollama": {
        "chat": [WELCOME, WELCOME],
        "tool_loop": [LOOPED] * 2,
        "format": [PERSON, PERSON],
        "generate": [WELCOME, WELCOME],
        "models": ["tiny:latest", True, "tiny:latest"],
        "errors": [["ResponseError", 404], ["ResponseError", 400], ["ResponseError", 401]],
    },
    "instructor": dict.fromkeys(
        ["tools", "tools_strict", "json_schema", "responses_tools", "partial", "anthropic_tools"], PERSON
    ),
    "ai-sdk": {
        f"{api}_{name}": value
        for api in APIS
        for name, value in {
            "second_turn": [WELCOME, WELCOME, int(api == "responses")],
            "loop_whole": [list(CALLS.values()), 2, END, WELCOME],
            "loop_streamed": [list(CALLS.values()), 2, END, WELCOME],
            "object_whole": PERSON,
            "object_streamed": PERSON,
            "forced_call": [["Person", PERSON]],
        }.items()
    }
    | {"custom_tool": [["run", "string", True]]},
}
"""By group and by what its program asks for, what comes."""

SCORED = ["loglikelihood", "in_batches", "remote_tokenizer"]
"""What the program of lm-eval asks for 30 likelihoods with."""
HARNESS = {"lm-eval": [*SCORED, "generate_until"]}

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "then", "one", "two", "three"]
PAIRS = [
    (" ".join(WORDS[i % 10 :] * (1 + i % 5)), " " + " ".join(reversed(WORDS[i % 7 : i % 7 + 1 + i % 5])))
    for i in range(29)
] + [(f"<|im_start|>user\n{THANKS}{TURN}{WELCOME[:7]}", WELCOME[7:])]
"""The last one is what the model itself would say. No start ends in a space, which the harness would move."""


def asked(group: str, *more: str) -> Any:
    """A test's parameters; it is skipped, before anything is made for it, where the group's clients are missing."""
    there = install.modules_of(group) if group in install.NODE else install.python_of(group)
    missing = not there.exists() or (group in install.NODE and shutil.which("node") is None)
    reason = f"{group} is not installed, there is no {there} or no program for it: `make clients`"
    return pytest.param(group, *more, marks=pytest.mark.skipif(missing, reason=reason))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    one = tiny_model(tmp_path_factory.mktemp("model"))
    turns = [key if key.startswith("<") else f"<|im_start|>user\n{key}" for key in LESSONS]
    texts = [f"{turn}{text}<|im_end|>\n" for turn, text in zip(turns, LESSONS.values(), strict=True)]
    tools = TEMPLATE.partition("{% for")[0]
    teach(
        one, {key: f"{text}<|im_end|>" for key, text in LESSONS.items()}, before=tools + "".join(texts * 2), steps=300
    )
    return one


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    with tiny_server(model, apis=["openai", "anthropic", "native", "metrics", "ollama"]) as one:
        yield one
        assert_balanced(one)


@pytest.fixture(scope="module")
def told(model: Path, server: Served) -> dict[str, dict[str, Any]]:
    """What the groups' programs told, each of which runs once; see `told_by`."""
    return {"": {"address": server.address, "model": model}}


def told_by(group: str, told: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the program of a group got."""
    if group not in told:
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OPENAI_BASE_URL")}
        env |= {"PEGBOARD_ADDRESS": told[""]["address"], "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "1"}
        env |= {"TOKENIZER": str(told[""]["model"]), "PAIRS": json.dumps(PAIRS)}
        env["LESSONS"] = json.dumps({name: value for name, value in vars(common).items() if name.isupper()})
        env["NODE_MODULES"] = str(install.modules_of(group))
        program = HERE / f"use_{group.replace('-', '_')}{'.mjs' if group in install.NODE else '.py'}"
        command = ["node" if group in install.NODE else str(install.python_of(group)), str(program)]
        run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PROGRAM_S, check=False)
        assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
        told[group] = json.loads(run.stdout.splitlines()[-1])
    return told[group]


def value_of(group: str, name: str, told: dict[str, dict[str, Any]]) -> Any:
    """What came of one of its questions, which may have failed."""
    one = told_by(group, told)[name]
    assert "error" not in one, one["error"]
    return one["value"]


@pytest.mark.parametrize(("group", "name"), [asked(group, name) for group, names in EXPECTED.items() for name in names])
def test_what_a_client_gets(told: dict[str, dict[str, Any]], group: str, name: str) -> None:
    assert value_of(group, name, told) == EXPECTED[group][name]


@pytest.mark.parametrize("group", [asked(group) for group in (*EXPECTED, *HARNESS)])
def test_all_that_is_asked_is_looked_at(told: dict[str, dict[str, Any]], group: str) -> None:
    assert set(told_by(group, told)) == set((EXPECTED | HARNESS)[group])


@pytest.fixture(scope="module")
def likelihoods(model: Path) -> list[tuple[float, bool]]:
    """By transformers in float32: how likely the ends are, in nats, and whether each token is the likeliest."""
    import torch
    import transformers

    tokenizer = Tokenizer.from_directory(model)
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = []
    for start, end in PAIRS:
        ids, length = tokenizer.encode(start + end), len(tokenizer.encode(start))
        with torch.inference_mode():
            logprobs = network(input_ids=torch.tensor([ids])).logits[0, length - 1 : -1].log_softmax(-1)
        tokens = torch.tensor(ids[length:])
        total = float(logprobs.gather(-1, tokens[:, None]).sum())
        found.append((total, bool((logprobs.argmax(-1) == tokens).all())))
    return found


@pytest.mark.parametrize("name", SCORED)
@pytest.mark.parametrize("group", [asked(group) for group in HARNESS])
def test_likelihoods_are_those_of_transformers(
    told: dict[str, dict[str, Any]], likelihoods: list[tuple[float, bool]], group: str, name: str
) -> None:
    """Sums of up to dozens of float32 logprobs, in other orders of batches and sums."""
    found = value_of(group, name, told)
    assert len(found) == len(PAIRS) == 30
    assert [one[0] for one in found] == pytest.approx([one[0] for one in likelihoods], abs=1e-2, rel=0)
    assert [one[1] for one in found] == [one[1] for one in likelihoods]
    assert [one[1] for one in likelihoods].count(True) >= 1


@pytest.mark.parametrize("group", [asked(group) for group in HARNESS])
def test_the_harness_generates(told: dict[str, dict[str, Any]], group: str) -> None:
    assert value_of(group, "generate_until", told) == [WELCOME]
