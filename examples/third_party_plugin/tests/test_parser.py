"""Texts that people can read, beside what the suite draws."""

import pytest
from pegboard.toolkit.parsing.output_parser import Content, OutputParserContext, ToolCallArguments, ToolCallStart

from pegboard_example_plugin.options import BracketedOptions
from pegboard_example_plugin.parser import BracketedParser

PARSER = BracketedParser(BracketedOptions(), OutputParserContext("", "AnyForCausalLM", "any"))
TOOLS = [{"name": "now", "parameters": {"type": "object"}}]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('Look: [[now {"zone": "UTC"}]]', [Content("Look:"), ToolCallStart(0, "now"), '{"zone": "UTC"}']),
        ("[[now {}]]\n[[now {}]]", [ToolCallStart(0, "now"), "{}", ToolCallStart(1, "now"), "{}"]),
        ("[[then {}]]", [Content("[[then {}]]")]),
        ("[[now]] and [more]", [Content("[[now]] and [more]")]),
    ],
)
def test_reading(text: str, expected: list[object]) -> None:
    stream = PARSER.stream(TOOLS)
    events = [*stream.feed(text), *stream.finish()]
    assert [one.text if isinstance(one, ToolCallArguments) else one for one in events] == expected


def test_the_model_is_told() -> None:
    said = PARSER.instructions(TOOLS)
    assert '[[name {"argument": "value"}]]' in said
    assert '"now"' in said
