"""Broken tool parsers, and the tests of the suite that notice."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.conformance.tool_parser import ToolParserContract
from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.parsers_plain.parser import PlainParser
from pegboard.plugins.parsers_tools.grammars import Around as Form
from pegboard.plugins.parsers_tools.grammars import tagged
from pegboard.plugins.parsers_tools.json_formats import HermesParser
from pegboard.toolkit.parsing.output_parser import Content, ToolCallArguments, ToolCallStart
from tests.mutants.streams import Around, around

pytestmark = pytest.mark.full


class HermesSuite(ToolParserContract):
    """The suite as an author of such a parser would have it."""

    chat_template = "{% if tools %}<tool_call>{% endif %}"


class LosesTheEnd(Around):
    def finish(self):
        return []


class TrimsPieces(Around):
    def feed(self, text):
        pieces = [Content(one.text.lstrip()) if isinstance(one, Content) else one for one in super().feed(text)]
        return [one for one in pieces if not isinstance(one, Content) or one.text]


class WaitsForLines(Around):
    """Holds text back until a line is complete, and everything that comes after the last one."""

    held = ""

    def feed(self, text):
        lines, mark, self.held = (self.held + text).rpartition("\n")
        return super().feed(lines + mark)


class TellsArgumentsAtTheEnd(Around):
    def __init__(self, inner):
        super().__init__(inner)
        self.kept: list[Any] = []

    def feed(self, text):
        out = []  # type: ignore[var-annotated]
        for one in super().feed(text):
            (self.kept if isinstance(one, ToolCallArguments) or self.kept else out).append(one)
        return out

    def finish(self):
        return [*self.kept, *super().finish()]


class TellsContentAtTheEnd(Around):
    def __init__(self, inner):
        super().__init__(inner)
        self.events: list[Any] = []

    def feed(self, text):
        self.events += super().feed(text)
        return []

    def finish(self):
        return [*self.events, *super().finish()]


class NeedsWholeMarkers(Around):
    """Looks for the marker in each piece alone."""

    def feed(self, text):
        if "<tool_call>" not in text and "<" in text:
            head, mark, tail = text.partition("<")
            return super().feed(head) + super().feed(mark + " " + tail)
        return super().feed(text)


class LooksAtEverythingAgain(Around):
    def __init__(self, inner):
        super().__init__(inner)
        self.text = ""

    def feed(self, text):
        self.text += text
        self.text.count("<tool_call>")
        self.seen = len(self.text.replace("<", "<").split(" "))
        return super().feed(text)


class TellsEmptyText(Around):
    def feed(self, text):
        return [*super().feed(text), Content("")]


class CountsFromOne(Around):
    def feed(self, text):
        return [
            type(one)(one.index + 1, one.name if isinstance(one, ToolCallStart) else one.text)
            if isinstance(one, (ToolCallStart, ToolCallArguments))
            else one
            for one in super().feed(text)
        ]


class ReadsOneId(Around):
    def feed(self, text):
        return [replace(one, id="f:0") if isinstance(one, ToolCallStart) else one for one in super().feed(text)]


class EscapesTwice(Around):
    def feed(self, text):
        return [
            ToolCallArguments(one.index, one.text.replace("\\n", "\\\\n"))
            if isinstance(one, ToolCallArguments)
            else one
            for one in super().feed(text)
        ]


class CallsAnybody(HermesParser):
    def stream(self, tools=(), *, prompt=""):
        return super().stream((), prompt=prompt)


class CallsNobodyWithoutTools(HermesParser):
    def stream(self, tools=(), *, prompt=""):
        return super().stream(tools or [{"name": "nobody"}], prompt=prompt)


class OneStreamForAll(HermesParser):
    def stream(self, tools=(), *, prompt=""):
        self.only = getattr(self, "only", None) or super().stream(tools, prompt=prompt)
        return self.only


class HasAnothersMarkers(HermesParser):
    call_markers = ("[TOOL_CALLS]",)


class ForcesAnotherFormat(HermesParser):
    def constraint(self, tools, **more):
        around = Form('<call>{"name": {name}, "arguments": ', "}</call>")
        return tagged(tools, around, parallel=True, required=True, trigger="<call>")


class TalksBehindForcedCalls(HermesParser):
    def constraint(self, tools, **more):
        tag = json.loads(super().constraint(tools, **more).source)  # type: ignore[union-attr]
        free = {key: tag[key] for key in tag if key not in ("separator", "begin", "end")}
        return Grammar("structural_tag", json.dumps({**free, "triggers": ["<tool_call>"]}))


class ForcesWithoutArguments(HermesParser):
    def constraint(self, tools, **more):
        bare = [{"name": one["name"]} for one in tools]
        return super().constraint(bare, **more)  # type: ignore[arg-type]


class ForcesWhomever(HermesParser):
    def constraint(self, tools, *, name="", **more):
        return super().constraint(tools, **more)


class ForcesTheFirst(HermesParser):
    def constraint(self, tools, *, name="", **more):
        return super().constraint(tools, name=name or tools[0]["name"], **more)


class OpensWithAnother(HermesParser):
    def openings(self, tools):
        return ["<call>"]


class OpensTheFirst(HermesParser):
    def openings(self, tools):
        return [f'<tool_call>\n{{"name": "{tools[0]["name"]}"']


class OpensWithJson(HermesParser):
    def openings(self, tools):
        return ["<tool_call>", "{"]


class OpensUnasked(PlainParser):
    def openings(self, tools):
        return ["<"]


class ExplainsTheFirst(HermesParser):
    def instructions(self, tools):
        return super().instructions(tools[:1])


class WritesNothingAsSomething(HermesParser):
    def write_calls(self, calls):
        return super().write_calls(calls) or "none"


class SameId(HermesParser):
    def call_id(self):
        return "call_1"


class OddIds(HermesParser):
    def call_id(self):
        return f"call {super().call_id()}"


class PromisesNothing(PlainParser):
    def constraint(self, tools, **more):
        return tagged(tools, Form("<x>", "</x>"), parallel=True, required=True, trigger="<x>")


class StripsTheTools(HermesParser):
    def stream(self, tools=(), *, prompt=""):
        for tool in tools:
            tool.pop("description", None)
        return super().stream(tools, prompt=prompt)


class CompletesTheSchemas(HermesParser):
    def constraint(self, tools, **more):
        for tool in tools:
            tool.setdefault("strict", True)
        return super().constraint(tools, **more)


class SilentHermes(HermesParser):
    """Reads its format and writes none."""

    def write_calls(self, calls):
        return ""


class SilentSuite(HermesSuite):
    def call_texts(self):
        weather = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
        return [
            ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', [("now", {})]),
            (weather, [("get_weather", {"city": "Rome", "days": 3})]),
        ]


def silent(stream: type[Around]) -> type[SilentHermes]:
    wrapped = around(stream, SilentHermes)
    wrapped.__name__ = f"Silent{stream.__name__}"
    return wrapped


class SilentCallsAnybody(SilentHermes):
    def stream(self, tools=(), *, prompt=""):
        return super().stream((), prompt=prompt)


class SilentOneStreamForAll(SilentHermes):
    def stream(self, tools=(), *, prompt=""):
        self.only = getattr(self, "only", None) or super().stream(tools, prompt=prompt)
        return self.only


def mutant(factory: type, caught_by: str, base: type = HermesParser) -> Mutant:
    suite = SilentSuite if issubclass(factory, SilentHermes) else HermesSuite
    return Mutant(factory, suite=suite, caught_by=caught_by, base=SilentHermes if suite is SilentSuite else base)


MUTANTS = [
    mutant(around(LosesTheEnd, HermesParser), "test_what_looks_like_a_call_is_content"),
    mutant(around(LosesTheEnd, HermesParser), "test_nothing_is_lost"),
    mutant(HasAnothersMarkers, "test_calls_begin_with_its_markers"),
    mutant(around(TrimsPieces, HermesParser), "test_text_without_calls_is_content"),
    mutant(around(WaitsForLines, HermesParser), "test_text_without_calls_is_content"),
    mutant(around(TellsArgumentsAtTheEnd, HermesParser), "test_arguments_are_told_as_they_come"),
    mutant(around(TellsContentAtTheEnd, HermesParser), "test_content_is_told_as_it_comes"),
    mutant(around(NeedsWholeMarkers, HermesParser), "test_how_the_text_is_cut_does_not_matter"),
    mutant(around(NeedsWholeMarkers, HermesParser), "test_calls_are_read"),
    mutant(around(LooksAtEverythingAgain, HermesParser), "test_the_work_is_in_proportion"),
    mutant(around(TellsEmptyText, HermesParser), "test_nothing_comes_of_nothing"),
    mutant(around(CountsFromOne, HermesParser), "test_calls_are_read"),
    mutant(around(EscapesTwice, HermesParser), "test_text_around_calls_is_content"),
    mutant(CallsAnybody, "test_a_function_that_nobody_offered_is_not_called"),
    mutant(CallsNobodyWithoutTools, "test_without_tools_every_function_will_do"),
    mutant(OneStreamForAll, "test_streams_know_nothing_of_each_other"),
    mutant(StripsTheTools, "test_tools_and_calls_are_read_and_not_changed"),
    mutant(CompletesTheSchemas, "test_tools_and_calls_are_read_and_not_changed"),
    mutant(silent(NeedsWholeMarkers), "test_calls_are_read"),
    mutant(silent(NeedsWholeMarkers), "test_how_the_text_is_cut_does_not_matter"),
    mutant(silent(LosesTheEnd), "test_nothing_is_lost"),
    mutant(silent(CountsFromOne), "test_text_around_calls_is_content"),
    mutant(SilentCallsAnybody, "test_a_function_that_nobody_offered_is_not_called"),
    mutant(SilentOneStreamForAll, "test_streams_know_nothing_of_each_other"),
    mutant(ForcesAnotherFormat, "test_forced_calls_are_read"),
    mutant(TalksBehindForcedCalls, "test_forced_calls_are_read"),
    mutant(ForcesWithoutArguments, "test_forced_calls_are_read"),
    mutant(ForcesWhomever, "test_a_named_function_is_called_once"),
    mutant(ForcesTheFirst, "test_every_function_can_be_forced"),
    mutant(OpensWithAnother, "test_forced_calls_open_as_it_says"),
    mutant(OpensTheFirst, "test_forced_calls_open_as_it_says"),
    mutant(OpensWithJson, "test_other_answers_do_not_open_so"),
    mutant(OpensUnasked, "test_no_openings_are_promised", PlainParser),
    mutant(ExplainsTheFirst, "test_instructions_name_every_function"),
    mutant(WritesNothingAsSomething, "test_no_calls_are_no_text"),
    mutant(SameId, "test_ids_are_new_and_plain"),
    mutant(around(ReadsOneId, HermesParser), "test_ids_that_it_reads_are_new"),
    mutant(OddIds, "test_ids_are_new_and_plain"),
    mutant(PromisesNothing, "test_no_grammar_is_promised", PlainParser),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: f"{one}-{one.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
