"""``pegboard bench serve`` against a server of our own: every API, with the tokens that the server's counters tell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pegboard.conformance.servers import Served
from pegboard.core.cli.main import app
from tests.e2e.clients import KEY, counters, idle, tiny_model, tiny_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with tiny_server(tiny_model(tmp_path_factory.mktemp("model"))) as served:
        yield served


def bench(server: Served, *options: str) -> Any:
    words = ["bench", "serve", "--url", server.address, "--json", "-", "--warmup", "0", *options]
    result = CliRunner().invoke(app, words, env={"PEGBOARD_API_KEY": KEY})
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


SHAPE = ("--num-prompts", "9", "--input-len", "24", "--output-len", "6", "--range-ratio", "0.5")


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (1, ("--concurrency", "3")),
        (2, ("--request-rate", "100")),
        (3, ("--api", "native", "--concurrency", "3")),
        (4, ("--api", "openai-chat")),
        (5, ("--prompt-kind", "text")),
        (6, ("--workload", "shared-prefix", "--prefix-len", "64", "--groups", "3", "--concurrency", "1")),
        (7, ("--api", "native", "--workload", "multi-turn", "--turns", "3", "--concurrency", "1")),
    ],
)
def test_tokens_are_those_of_the_servers_counters(server: Served, seed: int, options: tuple[str, ...]) -> None:
    before = idle(server)
    data = bench(server, *SHAPE, "--seed", str(seed), "--save-requests", *options)
    after = idle(server)
    run = data["median"]
    assert (run["completed"], run["failed"], run["counted"]) == (9, 0, {"usage": 9})
    assert run["finish_reasons"] == {"length": 9}
    # The request that looks what the server understands has 8 tokens, as a chat with the template's, and asks for 4.
    probe = after["prompt_tokens"] + after["cached_tokens"] - before["prompt_tokens"] - before["cached_tokens"]
    probe -= run["input_tokens"]
    assert 8 <= probe <= 200
    assert after["generated_tokens"] - before["generated_tokens"] == run["output_tokens"] + 4
    # Of the request that looks something may be in the cache, too, in a vocabulary of three hundred.
    assert 0 <= after["cached_tokens"] - before["cached_tokens"] - run["cached_tokens"] < probe
    for one in data["runs"][0]["records"]:
        assert one["sent"] <= one["first"] <= one["end"]
        assert one["counts"] is None or sum(one["counts"]) == one["output_tokens"]


def test_what_is_shared_is_found(server: Served) -> None:
    """Of each group only the first request computes the prefix; of a conversation each turn what is new."""
    options = ("--num-prompts", "12", "--input-len", "16", "--output-len", "4", "--concurrency", "1")
    data = bench(server, *options, "--workload", "shared-prefix", "--prefix-len", "48", "--groups", "3", "--seed", "8")
    # Own parts may begin alike by chance, in a vocabulary of three hundred.
    assert 9 * 48 <= data["median"]["cached_tokens"] <= 9 * 48 + 12
    data = bench(server, *options, "--workload", "multi-turn", "--api", "native", "--seed", "9")
    assert data["median"]["hit_rate"] > 0.5


def test_who_it_was(server: Served) -> None:
    data = bench(server, "--num-prompts", "1", "--seed", "11")
    about = data["server"]
    assert (about["api"], about["model"], about["prompt_kind"]) == ("openai", "tiny", "tokens")
    assert about["architecture"] == "MistralForCausalLM"
    assert KEY not in json.dumps(data)
    assert counters(server)["failed_batches"] == 0


def test_the_key_is_missed(server: Served, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-wrong\n")
    result = CliRunner().invoke(app, ["bench", "serve", "--url", server.address, "--api-key-file", str(key)])
    assert "(--api-key-file, or PEGBOARD_API_KEY in the environment)" in str(result.exception)
