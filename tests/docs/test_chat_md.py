"""The page on chats: its parser is one, its tables are complete, and its config works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from pegboard.conformance.mutants import Mutant, _run
from pegboard.conformance.streams import feed, one_by_one
from pegboard.conformance.tool_parser import TOOLS, ToolParserContract
from pegboard.core.config.compose import compose
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.registry.registry import Registry
from pegboard.plugins.api_anthropic.tools import LIMITS
from pegboard.toolkit.chat import tool_schema
from pegboard.toolkit.chat.rendering import RENDER_BYTES, RENDER_SECONDS
from pegboard.toolkit.parsing.output_parser import OutputParserContext
from tests.docs.test_docs import blocks

PAGE = (Path(__file__).parents[2] / "docs" / "chat.md").read_text("utf-8")


def parser_class() -> Any:
    space: dict[str, Any] = {"__name__": "chat_md"}
    exec(blocks(PAGE, "python")[0], space)
    return space["AtParser"]


def test_the_parser_reads_calls() -> None:
    cls = parser_class()
    ctx = OutputParserContext("{{ tools }} @call ", "", "")
    assert cls.supports(None, ctx) is None
    text = 'Look: @call {"name": "now", "arguments": {}}\n@call {"name": "get_weather", "arguments": {"city": "Rome"}}'
    found = feed(cls(NoOptions(), ctx).stream(TOOLS), one_by_one(text))
    assert found.loaded == [("now", {}), ("get_weather", {"city": "Rome"})]
    assert found.content == "Look:"


def test_it_passes_the_suite() -> None:
    class Suite(ToolParserContract):
        param = "at"
        chat_template = "{{ tools }} @call "

    cls = parser_class()
    for test in ("test_how_the_text_is_cut_does_not_matter", "test_nothing_is_lost", "test_calls_are_read"):
        done, text = _run(Mutant(cls, suite=Suite, caught_by=test, provides=frozenset(), options_model=NoOptions), cls)
        assert done.passed, text
        assert not done.failed, text


def test_every_parser_is_described() -> None:
    for contract in ("tool_parser", "reasoning_parser"):
        for record in Registry.discover().providers(contract):
            if record.origin.builtin:
                assert f"`{record.name}`" in PAGE


def test_the_config_is_one() -> None:
    (text,) = blocks(PAGE, "yaml")
    resolved = compose(data={"model": {"path": "demo:smollm2-135m-instruct"}, **yaml.safe_load(text)}, env={})
    assert resolved.named >= {"reasoning_parser"}


def test_the_limits_are_those() -> None:
    assert f"at most {tool_schema.MAX_TOOLS} functions, {tool_schema.MAX_TOOLS_CHARS // 1024} KiB" in PAGE
    assert f"{LIMITS.tools} functions and names of up to {LIMITS.name} characters" in PAGE
    assert f"nested at most {tool_schema.MAX_SCHEMA_DEPTH} deep" in PAGE
    assert f"{RENDER_SECONDS:g} seconds of computing time and {RENDER_BYTES >> 30} GiB" in PAGE
