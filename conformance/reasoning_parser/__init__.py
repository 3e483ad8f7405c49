"""The conformance suite of reasoning parsers."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.properties import properties
from pegboard.conformance.streams import cut, feed, garbled, grows_too_fast, one_by_one
from pegboard.conformance.suite import ContractSuite
from pegboard.toolkit.parsing.output_parser import OutputParser, OutputParserContext, ParserStream, Reasoning

PROMPT = "user: What does <think> mean?\nassistant:"
_SOME = st.sampled_from(["Well, 2 + 2", "漢😀 {x}", 'He said "no" \\n', "a < b > c </ think", "one\n\ntwo"])


class ReasoningParserContract(ContractSuite):
    """A thought is told from the answer however the text is cut."""

    contract = "reasoning_parser"

    chat_template: ClassVar[str] = ""
    """The chat template of a model that thinks so."""
    begin: ClassVar[str] = ""
    """What a thought begins with, "" for a parser that finds none."""
    end: ClassVar[str] = ""
    """What it ends with."""

    @pytest.fixture
    def parser(self) -> OutputParser:
        """Return the parser, for such a model."""
        made: OutputParser = self.build(OutputParserContext(self.chat_template, "TestForCausalLM", "test"))
        return made

    def stream(self, parser: OutputParser, *, opened: bool = False) -> ParserStream:
        """Return a stream of one answer; `opened`: the prompt began a thought."""
        return parser.stream(prompt=f"{PROMPT}{self.begin}\n" if opened else PROMPT)

    def needs_markers(self) -> None:
        """Skip the test of a parser that finds nothing."""
        if not self.begin:
            pytest.skip("it finds no thoughts")

    @properties()
    @given(data=st.data())
    def test_an_answer_without_a_thought_is_content(self, parser: OutputParser, data: st.DataObject) -> None:
        text = data.draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | _SOME)
        found = feed(self.stream(parser), data.draw(cut(text)))
        assert (found.content, found.reasoning) == (text, "")

    @properties()
    @given(data=st.data())
    def test_a_thought_is_told_from_the_answer(self, parser: OutputParser, data: st.DataObject) -> None:
        self.needs_markers()
        thought, answer = data.draw(_SOME), data.draw(_SOME | st.just(""))
        opened = data.draw(st.booleans())
        space = data.draw(st.sampled_from(["", "\n", "\n\n", " "]))
        begin = "" if opened else self.begin
        text = f"{begin}{space}{thought}{space}{self.end}{space}{answer}"
        found = feed(self.stream(parser, opened=opened), data.draw(cut(text)))
        assert (found.reasoning, found.content) == (thought, answer)
        assert found.order == (("Reasoning", "Content") if answer else ("Reasoning",))

    @properties(max_examples=80)
    @given(data=st.data())
    def test_how_the_text_is_cut_does_not_matter(self, parser: OutputParser, data: st.DataObject) -> None:
        text = data.draw(garbled(f"{self.begin}\n{data.draw(_SOME)}\n{self.end}\n\n{data.draw(_SOME)}"))
        opened = data.draw(st.booleans())
        whole = feed(self.stream(parser, opened=opened), [text])
        assert feed(self.stream(parser, opened=opened), data.draw(cut(text))) == whole
        assert feed(self.stream(parser, opened=opened), one_by_one(text)) == whole

    def test_a_thought_without_an_end_is_a_thought(self, parser: OutputParser) -> None:
        self.needs_markers()
        text = f"{self.begin}I wonder{self.end[:-1]}"
        for pieces in ([text], one_by_one(text)):
            found = feed(self.stream(parser), pieces)
            assert (found.reasoning, found.content) == (f"I wonder{self.end[:-1]}", "")

    def test_no_thought_is_none(self, parser: OutputParser) -> None:
        self.needs_markers()
        found = feed(self.stream(parser), one_by_one(f"{self.begin}\n\n{self.end}\n\nHi"))
        assert found.order == ("Content",)
        assert found.content == "Hi"

    def test_markers_in_the_answer_are_content(self, parser: OutputParser) -> None:
        self.needs_markers()
        answer = f"Write {self.begin}a{self.end}, then {self.end}."
        assert feed(self.stream(parser), one_by_one(answer)).content == answer
        found = feed(self.stream(parser), one_by_one(f"{self.begin}so{self.end}{answer}"))
        assert (found.reasoning, found.content) == ("so", answer)

    def test_a_closed_thought_in_the_prompt_is_over(self, parser: OutputParser) -> None:
        self.needs_markers()
        stream = parser.stream(prompt=f"{PROMPT}{self.begin}\n\n{self.end}\n\n")
        assert feed(stream, one_by_one("Hi")).content == "Hi"

    def test_a_thought_that_is_ended_is_over(self, parser: OutputParser) -> None:
        """By what `thought_form` says; it knows the same beginnings and ends as the stream."""
        for opened in (False, True):
            form = parser.thought_form(prompt=f"{PROMPT}{self.begin}\n" if opened else PROMPT)
            if form is None:
                continue
            assert form.opened == opened, "thought_form() and stream() read prompts in different ways"
            begin = "" if opened else form.begin
            for end in (form.closes[0], self.end):
                found = feed(self.stream(parser, opened=opened), one_by_one(f"{begin}so{end}"))
                assert (found.reasoning, found.content) == ("so", ""), f"{end!r} does not end a thought"
            last = f"{begin}so{form.closes[-1]}Hi"
            assert feed(self.stream(parser, opened=opened), one_by_one(last)).content.endswith("Hi")

    def test_thoughts_are_told_as_they_come(self, parser: OutputParser) -> None:
        self.needs_markers()
        stream = self.stream(parser, opened=True)
        told = sum(
            len(one.text) for char in "many words " * 50 for one in stream.feed(char) if isinstance(one, Reasoning)
        )
        assert told > 500

    def test_the_work_is_in_proportion(self, parser: OutputParser) -> None:
        for shape in ("word ", " ", "<", f"{self.begin}{self.end} ", f"{self.begin}x" + " " * 20_000):
            problem = grows_too_fast(lambda: self.stream(parser, opened=True), shape)
            assert not problem, problem
