"""The conformance suite of tool parsers."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.properties import properties
from pegboard.conformance.streams import cut, feed, garbled, grows_too_fast, one_by_one, sample, told
from pegboard.conformance.suite import ContractSuite, capability, lacks
from pegboard.toolkit.chat.call_or import CallOrStream
from pegboard.toolkit.parsing.output_parser import (
    Content,
    EarlierCall,
    OutputParser,
    OutputParserContext,
    ParserStream,
    ToolCallArguments,
    ToolCallStart,
    ToolFunction,
)

Call = tuple[str, dict[str, Any]]

_ANYTHING = {"type": "object"}
TOOLS: tuple[ToolFunction, ...] = (
    {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"type": "string", "enum": ["C", "F"]},
            },
            "required": ["city"],
        },
    },
    {
        "name": "save",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "options": _ANYTHING, "tags": {"type": "array"}},
            "required": ["text", "options"],
        },
    },
    {"name": "now", "parameters": {"type": "object", "properties": {}}},
)
"""The functions that requests of this suite have."""

NASTY = (
    '"quotes" \'single\'', "back\\slash \\n \\", "{braces} [brackets] }}}", "line\nbreak\ttab", "漢字 😀 é\u0301",
    "\\u00e9 is not an escape", "a, b=c) ]", "", " spaces ", "null", "5", "`;|%#",
)  # fmt: skip
_TEXT = st.sampled_from(NASTY) | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>"), max_size=12)
_SCALAR = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | _TEXT
_NESTED = st.recursive(
    _SCALAR,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)
CALL: st.SearchStrategy[Call] = st.one_of(
    st.tuples(
        st.just("get_weather"),
        st.fixed_dictionaries(
            {"city": _TEXT}, optional={"days": st.integers(-999, 999), "unit": st.sampled_from(["C", "F"])}
        ),
    ),
    st.tuples(
        st.just("save"),
        st.fixed_dictionaries(
            {"text": _TEXT, "options": st.dictionaries(_TEXT, _NESTED, max_size=3)},
            optional={"tags": st.lists(_NESTED, max_size=3)},
        ),
    ),
    st.tuples(st.just("now"), st.just({})),
)
"""Calls of `TOOLS`, as hypothesis draws them."""

_PROSE = st.sampled_from(["", "Let me look.", "Hm...\n\n", "The set is [1] {2}, (3).", " 漢😀\n"])


class ToolParserContract(ContractSuite):
    """Calls are found however the text is cut, text that is not a call stays, and what is forced is read back."""

    contract = "tool_parser"

    chat_template: ClassVar[str] = ""
    """The chat template of a model that writes so."""

    leads: ClassVar[bool] = True
    """Whether text may stand before a call. False for formats in which a call is the answer."""

    @pytest.fixture
    def parser(self) -> OutputParser:
        """Return the parser, for such a model."""
        made: OutputParser = self.build(OutputParserContext(self.chat_template, "TestForCausalLM", "test"))
        return made

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def stream(self, parser: OutputParser, tools: Sequence[ToolFunction] = TOOLS) -> ParserStream:
        """Return a stream of an answer to a request with `TOOLS`."""
        return parser.stream(copy.deepcopy(tools), prompt="user: Hi\nassistant:")

    def call_texts(self) -> Sequence[tuple[str, Sequence[Call]]]:
        """Texts of calls of `TOOLS`, and the calls that they stand for, as different as they can be: for a parser that
        reads a format and has no `write_calls`. Override this then.
        """
        return ()

    def written(self, parser: OutputParser, calls: Sequence[Call]) -> str:
        """Return the text of these very calls. Skips the test where the parser does not write."""
        text = parser.write_calls([{"name": name, "arguments": arguments} for name, arguments in calls])
        if not text:
            pytest.skip("it writes no calls, and an example of call_texts will not do here")
        return text

    def example(self, parser: OutputParser, data: st.DataObject | None = None, most: int = 1) -> tuple[str, list[Call]]:
        """Return text of at least one call, and the calls: as `data` draws them, or the simplest. Skips the test where
        the parser does not write and the author gives no examples.
        """
        if parser.write_calls([{"name": "now", "arguments": {}}]):
            calls = [("now", {})] if data is None else data.draw(st.lists(CALL, min_size=1, max_size=most))
            return self.written(parser, calls), calls
        texts = self.call_texts()
        if not texts:
            pytest.skip("it writes no calls; if it reads some, override call_texts with examples")
        text, given = texts[0] if data is None else data.draw(st.sampled_from(list(texts)))
        return text, list(given)

    # ---- text that is not a call -------------------------------------------------------------------------------------

    @properties(max_examples=40)
    @given(data=st.data())
    def test_text_without_calls_is_content(self, parser: OutputParser, data: st.DataObject) -> None:
        text = data.draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | _PROSE)
        found = feed(self.stream(parser), data.draw(cut(text)))
        assert (found.content, found.calls) == (text, ())

    def test_what_looks_like_a_call_is_content(self, parser: OutputParser) -> None:
        for text in (
            '{"answer": 42}', '[1, 2, 3]', "[link](https://example.com)", "[now] is the time", '{"name": "Ada"}',
            "f(x) = [x, y]", "<b>bold</b> <tool> x < y > z", "```json\n{}\n```", "{", "[", "<", '{"', "[now",
        ):  # fmt: skip
            for pieces in ([text], one_by_one(text)):
                found = feed(self.stream(parser), pieces)
                assert (found.content, found.calls) == (text, ()), text

    def test_nothing_comes_of_nothing(self, parser: OutputParser) -> None:
        assert feed(self.stream(parser), []).order == ()
        assert feed(self.stream(parser), ["", ""]).order == ()

    # ---- calls ------------------------------------------------------------------------------------------------------

    @properties(max_examples=40)
    @given(data=st.data())
    def test_calls_are_read(self, parser: OutputParser, data: st.DataObject) -> None:
        text, calls = self.example(parser, data, most=3)
        found = feed(self.stream(parser), data.draw(cut(text)))
        assert found.loaded == calls
        assert found.content == ""

    @properties(max_examples=40)
    @given(data=st.data())
    def test_text_around_calls_is_content(self, parser: OutputParser, data: st.DataObject) -> None:
        before = data.draw(_PROSE) if self.leads else ""
        after = data.draw(st.sampled_from(["", "\nThat was it.", "\n\n漢😀"]))
        text, calls = self.example(parser, data, most=2)
        text = f"{before}{text}{after}"
        found = feed(self.stream(parser), data.draw(cut(text)))
        assert found.loaded == calls
        assert found.content == (before.rstrip() + after if before.strip() else after.lstrip())

    @properties(max_examples=100)
    @given(data=st.data())
    def test_how_the_text_is_cut_does_not_matter(self, parser: OutputParser, data: st.DataObject) -> None:
        """Also of text that is nearly a call."""
        text, _ = self.example(parser, data, most=2)
        text = data.draw(_PROSE if self.leads else st.just("")) + text + data.draw(_PROSE)
        text = data.draw(garbled(text))
        whole = feed(self.stream(parser), [text])
        assert feed(self.stream(parser), data.draw(cut(text))) == whole
        assert feed(self.stream(parser), one_by_one(text)) == whole

    @properties(max_examples=40)
    @given(data=st.data())
    def test_nothing_is_lost(self, parser: OutputParser, data: st.DataObject) -> None:
        """Wherever an answer ends: what is not a call is content, to the last character."""
        text, calls = self.example(parser, data, most=2)
        before = "Look: " if self.leads else ""
        text = before + text
        text = text[: data.draw(st.integers(0, len(text)))]
        found = feed(self.stream(parser), data.draw(cut(text)))
        if not found.calls:
            assert found.content == text
        else:
            assert found.content.startswith(before.strip())
            assert text.rstrip().endswith(found.content.removeprefix(before.strip()).strip())
            *done, (name, arguments) = found.calls
            assert [(one, json.loads(text)) for one, text in done] == calls[: len(done)]
            assert name == calls[len(done)][0]
            _is_beginning(arguments)

    def test_a_function_that_nobody_offered_is_not_called(self, parser: OutputParser) -> None:
        text, calls = self.example(parser)
        every: tuple[ToolFunction, ...] = (*TOOLS, {"name": "other"})
        offered = [tool for tool in every if tool["name"] not in dict(calls)]
        for pieces in ([text], one_by_one(text)):
            found = feed(self.stream(parser, offered), pieces)
            assert (found.content, found.calls) == (text, ())

    def test_without_tools_every_function_will_do(self, parser: OutputParser) -> None:
        text, calls = self.example(parser)
        assert feed(self.stream(parser, ()), [text]).loaded == calls

    def test_calls_begin_with_its_markers(self, parser: OutputParser) -> None:
        """So that one in a thought is found."""
        if not parser.call_markers:
            pytest.skip("its calls have no markers")
        texts = [self.example(parser)[0], *(text for text, _ in self.call_texts())]
        for text in texts:
            assert text.lstrip().startswith(tuple(parser.call_markers)), f"it begins with no marker: {text}"

    def test_tools_and_calls_are_read_and_not_changed(self, parser: OutputParser) -> None:
        """They are the request's, and go to the chat template and to other parsers as well."""
        tools = list(copy.deepcopy(TOOLS))
        calls: list[EarlierCall] = [{"name": "save", "arguments": {"text": "x", "options": {"deep": [1]}}}]
        before = copy.deepcopy((tools, calls))
        text = parser.write_calls(calls)
        examples = [text, *(text for text, _ in self.call_texts()), "text"]
        for use in (
            lambda: [feed(parser.stream(tools, prompt=""), [text]) for text in examples if text],
            lambda: [parser.constraint(tools), parser.constraint(tools, name="now", parallel=False, required=False)],
            lambda: [parser.instructions(tools)],
        ):
            use()
            assert (tools, calls) == before, "the parser changed the tools or the calls that it was given"

    def test_streams_know_nothing_of_each_other(self, parser: OutputParser) -> None:
        one, other = self.stream(parser), self.stream(parser)
        if self.call_texts():
            (first, one_calls), (second, other_calls) = self.call_texts()[0], self.call_texts()[-1]
        else:
            one_calls, other_calls = [("now", {})], [("get_weather", {"city": "Rome"})]
            first, second = self.written(parser, one_calls), self.written(parser, other_calls)
        events: dict[int, list[Any]] = {0: [], 1: []}
        for index in range(max(len(first), len(second))):
            events[0] += one.feed(first[index : index + 1])
            events[1] += other.feed(second[index : index + 1])
        assert told([*events[0], *one.finish()]).loaded == list(one_calls)
        assert told([*events[1], *other.finish()]).loaded == list(other_calls)

    # ---- streaming --------------------------------------------------------------------------------------------------

    @capability("streams_arguments")
    def test_arguments_are_told_as_they_come(self, parser: OutputParser) -> None:
        text = self.written(parser, [("save", {"text": "word " * 200, "options": {}})])
        stream = self.stream(parser)
        so_far = 0
        for char in text[: text.rindex("word")]:
            so_far += sum(len(one.text) for one in stream.feed(char) if isinstance(one, ToolCallArguments))
        assert so_far > 900, f"{so_far} characters were told before the end came"

    def test_content_is_told_as_it_comes(self, parser: OutputParser) -> None:
        stream = self.stream(parser)
        events = [one for char in "many words " * 50 for one in stream.feed(char)]
        assert sum(len(one.text) for one in events if isinstance(one, Content)) > 500

    def test_the_work_is_in_proportion(self, parser: OutputParser) -> None:
        text = parser.write_calls([{"name": "save", "arguments": {"text": "x", "options": {}}}])
        text = text or self.example(parser)[0]
        half = (text.partition("x")[0] if "x" in text else text[: len(text) // 2]) + "xxyz 漢"
        for shape in ("word ", " ", "<{[", text, half + " " * 20_000):
            problem = grows_too_fast(lambda: self.stream(parser), shape)
            assert not problem, problem

    # ---- grammars ---------------------------------------------------------------------------------------------------

    @capability("forces")
    def test_forced_calls_are_read(self, parser: OutputParser) -> None:
        """And there is nothing beside them: no text before, between or after."""
        for seed in range(30):
            grammar = parser.constraint(copy.deepcopy(TOOLS))
            assert grammar is not None
            text = sample(grammar, seed)
            found = feed(self.stream(parser), one_by_one(text))
            assert found.calls, text
            assert found.content == "", text
            for name, arguments in found.loaded:
                needed = next(one for one in TOOLS if one["name"] == name)["parameters"].get("required")
                assert not isinstance(needed, list) or set(needed) <= set(arguments), text

    @capability("forces")
    def test_a_named_function_is_called_once(self, parser: OutputParser) -> None:
        for seed in range(20):
            grammar = parser.constraint(copy.deepcopy(TOOLS), name="get_weather", parallel=False)
            assert grammar is not None
            found = feed(self.stream(parser), [sample(grammar, seed)])
            assert [name for name, _ in found.loaded] == ["get_weather"]

    @capability("forces")
    def test_every_function_can_be_forced(self, parser: OutputParser) -> None:
        grammars = [parser.constraint(copy.deepcopy(TOOLS), parallel=False)] * 60
        texts = [sample(one, seed) for seed, one in enumerate(grammars) if one is not None]
        names = {name for text in texts for name, _ in feed(self.stream(parser), [text]).calls}
        assert names == {one["name"] for one in TOOLS}

    @lacks("forces")
    def test_no_grammar_is_promised(self, parser: OutputParser) -> None:
        assert parser.constraint(copy.deepcopy(TOOLS)) is None

    @capability("opens")
    def test_forced_calls_open_as_it_says(self, parser: OutputParser) -> None:
        for parallel in (True, False):
            for seed in range(30):
                grammar = parser.constraint(TOOLS, parallel=parallel)
                assert grammar is not None, "without a grammar there is nothing to begin"
                text = sample(grammar, seed)
                either = CallOrStream(self.stream(parser), parser.openings(TOOLS))
                found = feed(either, one_by_one(text))
                assert found.content == "", f"it begins otherwise than with {parser.openings(TOOLS)}: {text}"
                assert found == feed(self.stream(parser), [text])

    @capability("opens")
    def test_other_answers_do_not_open_so(self, parser: OutputParser) -> None:
        """And they come as they are written."""
        for text in (
            '{"answer": "<tool_call> [now()] <function=now></function>"}', '{"name": "Ada", "age": 36}', "[1, [2]]",
            '"text"', "-5", "true", "null", "[]", "{}", '{ "name" : "now" }', "[true]", '["now"]',
        ):  # fmt: skip
            stream = CallOrStream(self.stream(parser), parser.openings(TOOLS))
            before = told([event for char in text[:-1] for event in stream.feed(char)])
            assert before.content[:20] == text[:-1][:20] or len(text) < 20, f"{text} is held back"
            assert feed(CallOrStream(self.stream(parser), parser.openings(TOOLS)), one_by_one(text)).content == text

    @lacks("opens")
    def test_no_openings_are_promised(self, parser: OutputParser) -> None:
        assert not parser.openings(TOOLS)

    # ---- the rest ---------------------------------------------------------------------------------------------------

    def test_instructions_name_every_function(self, parser: OutputParser) -> None:
        text = parser.instructions(copy.deepcopy(TOOLS))
        assert not text or all(one["name"] in text for one in TOOLS)

    def test_no_calls_are_no_text(self, parser: OutputParser) -> None:
        assert parser.write_calls([]) == ""

    def test_ids_are_new_and_plain(self, parser: OutputParser) -> None:
        ids = {parser.call_id() for _ in range(200)}
        assert len(ids) == 200
        assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", one) for one in ids)

    def test_ids_that_it_reads_are_new(self, parser: OutputParser) -> None:
        """A call has the id that the model wrote, where it writes ids, unless another one has that already."""
        stream, text = self.stream(parser), parser.write_calls([{"name": "now", "arguments": {}}])
        events = [*stream.feed(text * 2), *stream.finish()]
        ids = [one.id for one in events if isinstance(one, ToolCallStart) and one.id]
        assert len(set(ids)) == len(ids), f"two calls of one answer have the same id: {ids}"

    def test_imports_no_torch(self) -> None:
        module = self.provider_class().__module__
        code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
        if "ModuleNotFoundError" in done.stderr and module in done.stderr:
            pytest.skip(f"{module} can be imported by the tests only")
        assert done.returncode == 0, done.stderr or f"importing {module} imports torch or transformers"


def _is_beginning(text: str) -> None:
    """Fail unless `text` is how JSON of an object may begin, as far as brackets and quotes say."""
    assert not text or text[0] == "{", text
    depth, quoted, escaped = 0, False, False
    for index, char in enumerate(text):
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = quoted
        elif char == '"':
            quoted = not quoted
        elif not quoted:
            depth += (char in "{[") - (char in "}]")
            assert depth > 0 or index == len(text) - 1, text
