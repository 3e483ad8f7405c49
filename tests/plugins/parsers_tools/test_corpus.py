"""The corpus of outputs, whole and streamed."""

from __future__ import annotations

import pytest

from pegboard.conformance.streams import Told, feed, one_by_one
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.registry.registry import Registry
from pegboard.toolkit.parsing.output_parser import OutputParser, OutputParserContext
from tests.plugins.parsers_tools.corpus import OUTPUTS, TOOLS, Output

REGISTRY = Registry.discover()


def parser_of(output: Output) -> OutputParser:
    record = REGISTRY.get("tool_parser", output.parser)
    assert record is not None
    made: OutputParser = record.load()(NoOptions(), OutputParserContext("", "", ""))
    return made


@pytest.mark.parametrize("output", OUTPUTS, ids=str)
def test_an_output_is_read(output: Output) -> None:
    parser = parser_of(output)

    def read(pieces: list[str]) -> Told:
        return feed(parser.stream(TOOLS), pieces)

    whole = read([output.text])
    assert whole.content == output.content
    assert whole.loaded == list(output.calls)
    assert read([*one_by_one(output.text)]) == whole
    for at in range(1, len(output.text)):
        assert read([output.text[:at], output.text[at:]]) == whole, f"cut after {output.text[:at]!r}"


def test_arguments_are_json_for_any_reader() -> None:
    """Numbers beyond doubles stay as they were written: Infinity is not JSON."""
    text = "<tool_call><function=ship><parameter=weight>1e400</parameter></function></tool_call>"
    found = feed(parser_of(Output("qwen3_coder", text, ())).stream(TOOLS), [text])
    assert found.calls == (("ship", '{"weight": 1e400}'),)
    text = '<tool_call>{"name": "ship", "arguments": {"weight": -1e400, "id": -Infinity}}</tool_call>'
    found = feed(parser_of(Output("hermes", text, ())).stream(TOOLS), [text])
    assert found.calls == (("ship", '{"weight": -1e400, "id": null}'),)
