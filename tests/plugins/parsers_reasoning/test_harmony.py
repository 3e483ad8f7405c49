"""gpt-oss's thoughts end for a budget where they end for the parser."""

from __future__ import annotations

import pytest

from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.parsers_reasoning.harmony import HarmonyParser
from pegboard.toolkit.parsing.output_parser import OutputParserContext, Reasoning
from pegboard.toolkit.parsing.thoughts import Watch


@pytest.mark.parametrize(
    "after",
    [
        "<|channel|>commentary to=functions.f<|message|>{}",
        "<|channel|>final <|constrain|>json<|message|>{}",
        "<|end|><|start|>assistant<|channel|>final<|message|>Four.",
    ],
)
def test_an_analysis_ends_for_both(after: str) -> None:
    parser = HarmonyParser(NoOptions(), OutputParserContext("<|channel|>", "GptOss", "gpt-oss"))
    form = parser.thought_form()
    assert form is not None
    text = f"<|channel|>analysis<|message|>Hm.{after}"
    assert not Watch(form, text).thinking
    stream = parser.stream()
    events = [*stream.feed(text), *stream.finish()]
    assert "".join(event.text for event in events if isinstance(event, Reasoning)) == "Hm."
