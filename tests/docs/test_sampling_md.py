"""What docs/sampling.md says: its table against SamplingParams, its config, its request, and its processor, which keeps
the contract.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pegboard.conformance.logits_processor import LogitsProcessorContract
from pegboard.core.config.compose import compose
from pegboard.core.frontend.intake import MAX_TOKEN_IDS
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import MAX_STOP_PATTERNS, MAX_STOP_STRINGS, SamplingParams
from pegboard.plugins.stop_expressions.program import MAX_STATES
from pegboard.toolkit.http.generation import SamplingFields

PAGE = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text("utf-8")


def block(language: str) -> str:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return str(text)


NAMESPACE: dict[str, Any] = {}
exec(compile(block("python"), "docs/sampling.md", "exec", dont_inherit=True), NAMESPACE)


class TestEvery(LogitsProcessorContract):
    factory = NAMESPACE["Every"]
    provides = frozenset({"params"})

    def asking(self) -> list[SamplingParams]:
        return [
            SamplingParams(extra={"every": {"token": 97, "every": 5}}),
            SamplingParams(extra={"every": {"token": 5}}),
        ]


def test_the_table_has_every_field() -> None:
    table = "\n".join(line for line in PAGE.splitlines() if line.startswith("| `"))
    named = set(re.findall(r"`(\w+)`", table))
    elsewhere = {"grammar", "extra", "unset"}
    assert (set(SamplingParams.__struct_fields__) | set(SamplingFields.model_fields)) - elsewhere <= named
    assert f"| {MAX_STOP_STRINGS}, {MAX_STOP_PATTERNS}, {MAX_TOKEN_IDS} entries |" in table
    assert f"{MAX_STATES} states" in PAGE


def test_the_defaults_are_those_of_the_table() -> None:
    fields = SamplingFields()
    for line in PAGE.splitlines():
        if match := re.match(r"\| `(\w+)` \| (-?\d+|true|false) \|", line):
            name, default = match.groups()
            assert getattr(fields, name) == json.loads(default), name


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty"])
def test_the_ranges_are_those_of_the_table(name: str) -> None:
    (allowed,) = re.findall(rf"^\| `{name}`[^|]*\| [^|]* \| ([^|]*) \|", PAGE, re.MULTILINE)
    low, high = map(float, re.findall(r"-?\d+", allowed))
    SamplingParams(**{name: high}).validate()  # type: ignore[arg-type]
    for wrong in (high + 0.01, low - 0.01, *((low,) if "above" in allowed else ())):
        with pytest.raises(InvalidRequest):
            SamplingParams(**{name: wrong}).validate()


def test_the_config_and_the_request_work() -> None:
    resolved = compose(data={"model": {"path": "nowhere"}, **yaml.safe_load(block("yaml"))}, env={})
    assert [one.use for one in resolved.engine.logits_processors][-3:] == ["bad_words", "allowed_token_ids", "dry"]
    body = SamplingFields.model_validate(json.loads(block("json")))
    assert body.sampling_params(max_new_tokens=1, min_new_tokens=0).extra == {"dry": {"multiplier": 0.8}}
