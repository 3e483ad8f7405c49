"""Constrained answers: whatever finishes follows its grammar, with both backends.

On every run with a tiny random model, which says anything its grammar allows; on `make test-full` with the demo model,
whose vocabulary is a real one, over all of the two hundred schemas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.engine.engine import Engine, GenerateOutput
from pegboard.core.interfaces.admission_gate import AdmissionGateContext
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.sampling import Grammar, SamplingParams
from pegboard.plugins.grammar.gate import GrammarGate
from pegboard.plugins.grammar.options import GrammarSection
from pegboard.plugins.grammar.stage import GrammarStage
from pegboard.toolkit.grammars.grammar import grammar_of
from tests.e2e.schemas import corpus

BACKENDS = ("llguidance", "xgrammar")
REFUSED = {"llguidance": 0, "xgrammar": 16}
"""Schemas of the two hundred that a backend refuses, at most: xgrammar enforces fewer keywords, and those that it does
not enforce are refused instead of ignored."""

REGEXES = (
    r"[a-z]{3,8}", r"(red|green|blue)( (red|green|blue)){0,2}", r"\d{3}-\d{4}", r"[A-Z][a-z]+, [A-Z]{2} \d{5}",
    r"(yes|no|maybe)", r"#[0-9a-f]{6}", r"[^\s]{1,12}", r"(ab?c)*d", r"\w{1,10}@\w{1,8}\.(com|org)", r"x{2,5}y?|z+",
    r"[01]{8}", r"(é|ü|ß){1,4}!",
)  # fmt: skip


def _balanced(text: str) -> bool:
    return re.fullmatch(r"\(*a\)*", text) is not None and text.count("(") == text.count(")")


def _sum(text: str) -> bool:
    return re.fullmatch(r"\d{1,2}( [-+*] \d{1,2})*", text) is not None


def _pairs(text: str) -> bool:
    return all(re.fullmatch(r"[a-z]{1,4}=[^,=\n]{1,6}", pair) for pair in text.split(", "))


def _nested(text: str) -> bool:
    json.loads(text.replace("(", "[").replace(")", "]").replace(" ", ","))
    return True


EBNFS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ('root ::= "yes" | "no" (", " [a-z]{2,6})?', lambda text: bool(re.fullmatch(r"yes|no(, [a-z]{2,6})?", text))),
    ('root ::= "a" | "(" root ")"', _balanced),
    ('root ::= num (op num){0,4}\nnum ::= [0-9]{1,2}\nop ::= " " [-+*] " "', _sum),
    ('root ::= pair (", " pair){0,2}\npair ::= [a-z]{1,4} "=" value\nvalue ::= [^,=\\n]{1,6}', _pairs),
    ('root ::= "(" (item (" " item){0,2})? ")"\nitem ::= [0-9] | root', _nested),
    ('root ::= [a-z]{1,5} "x"', lambda text: bool(re.fullmatch(r"[a-z]{1,5}x", text))),
    ('root ::= root "b" | "a"', lambda text: bool(re.fullmatch(r"ab*", text))),
    (
        'root ::= ("ab" | "a") ("bc" | "c") end\nend ::= "." | "!" end',
        lambda text: bool(re.fullmatch(r"ab?b?c!*\.", text)),
    ),
)

TAG: dict[str, Any] = {
    "structures": [
        {"begin": "<f=add>", "schema": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}, "end": "</f>"},
        {"begin": "<f=say>", "schema": {"type": "string", "maxLength": 6}, "end": "</f>"},
    ],
    "triggers": ["<f="],
    "at_least_one": True,
    "stop_after_first": True,
}


def _tagged(text: str) -> bool:
    found = re.fullmatch(r"<f=(add|say)>(.*)</f>", text, re.DOTALL)
    assert found is not None
    value = json.loads(found[2])
    return isinstance(value, list if found[1] == "add" else str)


FORMATS = jsonschema.FormatChecker(())
FORMATS.checkers = dict(jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers)


@FORMATS.checks("ipv4")
def _dotted_quad(value: object) -> bool:
    """As RFC 2673 has it, which JSON Schema names: up to three digits, leading zeros among them. Python takes none."""
    parts = str(value).split(".")
    return len(parts) == 4 and all(re.fullmatch("[0-9]{1,3}", one) and int(one) < 256 for one in parts)


def validate(schema: Any, text: str) -> None:
    jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(text))


def _matches(regex: str, text: str) -> bool:
    """Whether it does with classes of Unicode or of ASCII: `\\s` and the like are one or the other, by backend."""
    return any(re.fullmatch(regex, text, flags) for flags in (re.NOFLAG, re.ASCII))


def answers(engine: Engine, grammars: Sequence[Grammar], tokens: int, prompt: str) -> list[GenerateOutput]:
    return engine.run([
        GenerateRequest(
            prompt=prompt,
            sampling=SamplingParams(max_new_tokens=tokens, temperature=1.0, seed=number, grammar=grammar),
        )
        for number, grammar in enumerate(grammars)
    ])  # fmt: skip


def check_schemas(engine: Engine, schemas: Sequence[tuple[str, Any]], tokens: int, prompt: str) -> tuple[int, int]:
    """How many answers finished, all of them right, and how many schemas were refused."""
    wanted = [grammar_of(json_schema=schema) for _, schema in schemas]
    finished, refused, wrong = 0, 0, []
    outputs = answers(engine, [grammar for grammar in wanted if grammar is not None], tokens, prompt)
    for (name, schema), output in zip(schemas, outputs, strict=True):
        reason = output.finish_reason
        if reason["type"] == "abort":
            assert (reason["status"], reason["param"]) == (400, "json_schema"), (name, reason)
            refused += 1
        elif reason["type"] == "stop":
            finished += 1
            try:
                validate(schema, output.text)
            except (ValueError, jsonschema.ValidationError) as error:
                wrong.append(f"{name}: {output.text!r} for {json.dumps(schema)}: {str(error).splitlines()[0]}")
    assert not wrong, "\n".join(wrong)
    return finished, refused


def check_others(engine: Engine, tokens: int, prompt: str) -> int:
    """How many answers to regexes, EBNF and structural tags finished, all of them right."""
    cases: list[tuple[Grammar, Callable[[str], bool]]] = [
        (Grammar("regex", regex), lambda text, regex=regex: _matches(regex, text))  # type: ignore[misc]
        for regex in REGEXES
    ]
    cases += [(Grammar("ebnf", source), right) for source, right in EBNFS]
    cases += [(Grammar("structural_tag", json.dumps(TAG)), _tagged)] * 3
    cases += [(Grammar("json_object"), lambda text: isinstance(json.loads(text), dict))]
    finished = 0
    outputs = answers(engine, [grammar for grammar, _ in cases], tokens, prompt)
    for (grammar, right), output in zip(cases, outputs, strict=True):
        assert output.finish_reason["type"] != "abort", (grammar, output.finish_reason)
        if output.finish_reason["type"] == "stop":
            finished += 1
            assert right(output.text), f"{output.text!r} for {grammar}"
    return finished


def config(path: str, use: str, **more: Any) -> dict[str, Any]:
    return {
        "model": {"path": path, "dtype": "float32", "device": "cpu"},
        "attention": {"use": "torch"},
        "grammar": {"use": use, "queue_timeout": 600, "compile_timeout": 60},
        "scheduler": {"max_running_requests": 64, **more},
        "log_level": "error",
    }


ARRANGED = [
    pytest.param(("llguidance", "normal"), id="llguidance"),
    pytest.param(("llguidance", "overlap"), id="llguidance-overlap", marks=pytest.mark.full),
    pytest.param(("xgrammar", "overlap"), id="xgrammar-overlap"),
]


@pytest.fixture(scope="module", params=ARRANGED)
def tiny(request: pytest.FixtureRequest, checkpoints: Path) -> Iterator[Engine]:
    use, loop = request.param
    model = tiny_checkpoint(checkpoints, "llama", num_hidden_layers=2)
    with Engine.from_config(config(str(model), use, loop=loop, chunked_prefill_size=8)) as engine:
        yield engine


def test_schemas(tiny: Engine) -> None:
    finished, refused = check_schemas(tiny, corpus()[::7], 200, "once upon a time")
    assert refused <= 4
    assert finished >= 15


def test_regexes_and_ebnf_and_structural_tags(tiny: Engine) -> None:
    assert check_others(tiny, 200, "once upon a time") >= 16


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("use", BACKENDS)
def test_two_hundred_schemas_with_the_demo_model(use: str) -> None:
    with Engine.from_config(config("demo:smollm2-135m-instruct", use)) as engine:
        finished, refused = check_schemas(engine, corpus(), 160, "An example in JSON:\n")
        assert refused <= REFUSED[use]
        assert finished >= 140
        assert check_others(engine, 120, "For example: ") >= 15


@pytest.mark.full
def test_a_hundred_schemas_with_the_demo_model() -> None:
    with Engine.from_config(config("demo:smollm2-135m-instruct", "llguidance")) as engine:
        finished, refused = check_schemas(engine, corpus()[::2], 160, "An example in JSON:\n")
        assert refused <= REFUSED["llguidance"]
        assert finished >= 70


def test_a_server_without_grammars_says_so(checkpoints: Path) -> None:
    model = tiny_checkpoint(checkpoints, "llama", num_hidden_layers=2)
    with Engine.from_config(config(str(model), "none")) as engine:
        assert not [one for one in engine.info.features if one.startswith("grammar.")]
        assert engine.generate("hello", SamplingParams(max_new_tokens=3)).token_ids
        with pytest.raises(Exception, match=r"grammar\.use") as error:
            engine.generate("hello", SamplingParams(max_new_tokens=3, grammar=Grammar("regex", "a")))
        assert getattr(error.value, "status", None) == 400
        assert getattr(error.value, "param", None) == "regex"


def test_an_engine_without_the_plugin_does_without_grammars(checkpoints: Path) -> None:
    model = tiny_checkpoint(checkpoints, "llama", num_hidden_layers=2)
    settings = config(str(model), "auto")
    del settings["grammar"]
    with Engine.from_config({**settings, "plugins": {"grammar": False}}) as engine:
        assert "grammar" not in engine.info.stages
        assert engine.generate("hello", SamplingParams(max_new_tokens=3)).token_ids
        with pytest.raises(Exception, match="regex: no plugin of this server serves it") as error:
            engine.generate("hello", SamplingParams(max_new_tokens=3, grammar=Grammar("regex", "a")))
        assert getattr(error.value, "param", None) == "regex"


def test_no_helper_outlives_its_engine(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gates: list[GrammarGate] = []
    make = GrammarStage.gate

    def gate(stage: GrammarStage, ctx: AdmissionGateContext) -> GrammarGate:
        made = make(stage, ctx)
        assert made is not None
        gates.append(made)
        return made

    monkeypatch.setattr(GrammarStage, "gate", gate)
    model = tiny_checkpoint(checkpoints, "llama", num_hidden_layers=2)
    with Engine.from_config(config(str(model), "llguidance")) as engine:
        pool = gates[0].pool
        assert engine.info.stages["grammar"]["max_source_bytes"] == GrammarSection().max_source_bytes
        assert pool.pids() == [], "nobody has asked for a grammar yet"
        engine.generate("hello", SamplingParams(max_new_tokens=3, grammar=Grammar("regex", "[a-z]*")))
        pids = pool.pids()
        assert pids
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
