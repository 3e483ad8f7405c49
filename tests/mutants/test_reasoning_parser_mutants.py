"""Broken reasoning parsers, and the tests of the suite that notice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.conformance.reasoning_parser import ReasoningParserContract
from pegboard.plugins.parsers_reasoning.parsers import ThinkParser
from pegboard.toolkit.parsing.output_parser import Content, Reasoning
from tests.mutants.streams import Around, around


class ThinkSuite(ReasoningParserContract):
    """The suite as an author of such a parser would have it."""

    param = "deepseek_r1"
    chat_template = "<think>{{ content.split('</think>')[-1] }}"
    begin, end = "<think>", "</think>"


class LosesTheEnd(Around):
    def finish(self):
        return []


class ThinksAtTheEnd(Around):
    def __init__(self, inner):
        super().__init__(inner)
        self.events: list[Any] = []

    def feed(self, text):
        self.events += super().feed(text)
        return []

    def finish(self):
        return [*self.events, *super().finish()]


class ThinksBehindTheAnswer(ThinksAtTheEnd):
    def finish(self):
        events = super().finish()
        return sorted(events, key=lambda one: isinstance(one, Reasoning))


class NeedsWholeMarkers(Around):
    def feed(self, text):
        if "<" in text and "think>" not in text:
            text = text.replace("<", "< ")
        return super().feed(text)


class TellsItAgain(Around):
    def feed(self, text):
        return [
            piece
            for one in super().feed(text)
            for piece in ([one, Content(one.text)] if isinstance(one, Reasoning) else [one])
        ]


class TellsEmptyThoughts(Around):
    def finish(self):
        return [Reasoning(" "), *super().finish()]


class LooksAtEverythingAgain(Around):
    def __init__(self, inner):
        super().__init__(inner)
        self.text = ""

    def feed(self, text):
        self.text += text
        self.seen = len(self.text.replace("<", "<").split(" "))
        return super().feed(text)


class IgnoresThePrompt(ThinkParser):
    def stream(self, tools=(), *, prompt=""):
        return super().stream(tools)


class BelievesTheUser(ThinkParser):
    def stream(self, tools=(), *, prompt=""):
        return super().stream(tools, prompt=prompt[: prompt.rfind("<think>") + 7] if "<think>" in prompt else prompt)


class AlwaysThinks(ThinkParser):
    def stream(self, tools=(), *, prompt=""):
        return super().stream(tools, prompt="<think>")


class HidesMarkers(ThinkParser):
    def stream(self, tools=(), *, prompt=""):
        inner = super().stream(tools, prompt=prompt)

        class Hides(Around):
            def feed(self, text):
                out = super().feed(text)
                return [Content(one.text.replace("<", "")) if isinstance(one, Content) else one for one in out]

        return Hides(inner)


class EndsThoughtsWithoutAMarker(ThinkParser):
    def thought_form(self, *, prompt=""):
        form = super().thought_form(prompt=prompt)
        assert form is not None
        return replace(form, closes=("</thought>",))


class EndsWhatHasNotBegun(ThinkParser):
    def thought_form(self, *, prompt=""):
        return super().thought_form()


def mutant(factory: type, caught_by: str) -> Mutant:
    return Mutant(factory, suite=ThinkSuite, caught_by=caught_by, base=ThinkParser)


MUTANTS = [
    mutant(around(LosesTheEnd, ThinkParser), "test_a_thought_without_an_end_is_a_thought"),
    mutant(around(ThinksAtTheEnd, ThinkParser), "test_thoughts_are_told_as_they_come"),
    mutant(around(ThinksBehindTheAnswer, ThinkParser), "test_a_thought_is_told_from_the_answer"),
    mutant(around(NeedsWholeMarkers, ThinkParser), "test_how_the_text_is_cut_does_not_matter"),
    mutant(around(TellsItAgain, ThinkParser), "test_a_thought_is_told_from_the_answer"),
    mutant(around(TellsEmptyThoughts, ThinkParser), "test_no_thought_is_none"),
    mutant(around(LooksAtEverythingAgain, ThinkParser), "test_the_work_is_in_proportion"),
    mutant(IgnoresThePrompt, "test_a_thought_is_told_from_the_answer"),
    mutant(BelievesTheUser, "test_an_answer_without_a_thought_is_content"),
    mutant(BelievesTheUser, "test_a_closed_thought_in_the_prompt_is_over"),
    mutant(AlwaysThinks, "test_an_answer_without_a_thought_is_content"),
    mutant(EndsThoughtsWithoutAMarker, "test_a_thought_that_is_ended_is_over"),
    mutant(EndsWhatHasNotBegun, "test_a_thought_that_is_ended_is_over"),
    mutant(HidesMarkers, "test_markers_in_the_answer_are_content"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: f"{one}-{one.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
