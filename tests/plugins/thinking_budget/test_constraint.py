"""What binds the tokens of a request with a budget, put to the suite of constraints: alone, and beside a grammar."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pegboard.conformance.fake_client import FakeTokenizer
from pegboard.conformance.token_constraint import TokenConstraintContract, append, take
from pegboard.core.interfaces.constraint import TokenConstraint, constrain
from pegboard.core.interfaces.req import SINGLE, Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.plugins.thinking_budget.constraint import BesideAnother, BudgetConstraint
from pegboard.plugins.thinking_budget.messages import Asked
from pegboard.toolkit.parsing.thoughts import Watch
from tests.plugins.grammar import test_constraint as texts

WORDS = 4


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def asked(tokens: int, *closes: str, **more: Any) -> Asked:
    fields: dict[str, Any] = {"begin": "<t>", "ends": ("</t>",), "opened": True, **more}
    return Asked(tokens=tokens, closes=tuple(map(ids, closes or ("</t>",))), **fields)


def bound(tokens: int, *closes: str, flags: int = 0, most: int = 24, **more: Any) -> tuple[Req, BudgetConstraint]:
    req = Req("r", np.array([1]), SamplingParams(max_new_tokens=most))
    req.flags |= flags
    constraint = BudgetConstraint(req, asked(tokens, *closes, **more), FakeTokenizer(), WORDS)
    constrain(req, constraint)
    return req, constraint


def written(req: Req, constraint: TokenConstraint, text: Sequence[str]) -> str:
    """Return the output of a model that wants to write these texts, as far as it is let."""
    for char in text:
        mask = constraint.mask()
        token = ord(char)
        if mask is not None and not mask.view(np.uint32)[token // 32] >> token % 32 & 1:
            token = int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0])
        if take(req, constraint, token) is not None:
            break
    return "".join(map(chr, req.output_ids))


class TestAlone(TokenConstraintContract):
    def make(self, req: Req) -> TokenConstraint:
        return BudgetConstraint(req, asked(5), FakeTokenizer(), WORDS)


class TestOfNoToken(TokenConstraintContract):
    def make(self, req: Req) -> TokenConstraint:
        return BudgetConstraint(req, asked(0), FakeTokenizer(), WORDS)


class TestBesideAGrammar(texts.Bound):
    """Of texts among which the budget's end is one way to go on."""

    grammars = texts.grammars(60, 2)

    def make(self, req: Req) -> TokenConstraint:
        budget = BudgetConstraint(req, asked(2, "\x06\x07"), FakeTokenizer(), 3)
        return BesideAnother(budget, super().make(req))


class TestBesideASlowGrammar(TestBesideAGrammar):
    grammars = texts.grammars(0, 2)


@pytest.mark.parametrize("flags", [0, SINGLE])
@pytest.mark.parametrize("tokens", range(7))
def test_a_thought_ends_after_so_many_tokens(tokens: int, flags: int) -> None:
    found = written(*bound(tokens, flags=flags), "abcdef</t>four")
    assert found.startswith(f"{'abcdef'[:tokens]}</t>")


def test_an_end_that_has_begun_is_not_begun_again() -> None:
    assert written(*bound(4, flags=SINGLE), "abc</t>d") == "abc</t>d"
    assert written(*bound(5), "abc<") == "abc<"
    assert written(*bound(4), "abc<d") == "abc</t>d"
    assert written(*bound(2, opened=False), "<t>a<d") == "<t>a</t>d"


@pytest.mark.parametrize("flags", [0, SINGLE])
def test_one_that_ends_in_time_is_left_alone(flags: int) -> None:
    assert written(*bound(9, flags=flags), "ab</t>and so on, <t> and on") == "ab</t>and so on, <t> and"


def test_only_what_is_thought_counts() -> None:
    assert written(*bound(2, opened=False), " <t>abcd") == " <t>ab</t>cd"
    assert written(*bound(0, opened=False), "<t>abcd") == "<t></t>abcd"
    assert written(*bound(0, opened=False), "No <t>abcd") == "No <t>abcd"


def test_what_the_answer_begins_with_says_where_it_is() -> None:
    assert written(*bound(1, opened=False, text="<t>Hm"), "abc") == "a</t>bc"
    assert written(*bound(1, opened=True, text="Hm</t>So"), "abc") == "abc"


def test_further_thoughts_are_ended_with_less_left_to_choose() -> None:
    options: dict[str, Any] = {"begin": "[", "ends": ("]",), "opened": False, "answer": "!"}
    assert written(*bound(3, "]", "]!", **options), "[ab] [cdef") == "[ab] [c]def"
    assert written(*bound(1, "]", "]!", **options), "[ab [cd [e") == "[a]b []!cd [e"
    assert written(*bound(1, "]", "]!", **options), "! [abcd") == "! [abcd"


def test_the_length_of_a_request_cuts_what_is_forced() -> None:
    req, constraint = bound(2, most=4)
    assert written(req, constraint, "abcdef") == "ab</"
    assert req.finished


def test_drafts_end_where_the_thought_has_to() -> None:
    req, constraint = bound(4)
    append(req, ord("a"))
    assert constraint.advance(ord("a"), False) == []
    tree = ([ord(char) for char in "abcdx"], [-1, 0, 1, 2, 0])
    keep, masks = constraint.walk(tree, 20)
    assert keep.tolist() == [True, True, True, False, True]
    assert masks.free.all()


class TestWatch:
    @pytest.mark.parametrize("cut", [1, 2, 3, 50])
    def test_how_the_text_is_cut_does_not_matter(self, cut: int) -> None:
        text = "  <t>a < b </t </t> <t>"
        watch = Watch(asked(1, opened=False))
        for piece in re.findall(f"(?s).{{1,{cut}}}", text):
            watch.feed(piece)
        assert (watch.thinking, watch.over) == (False, True)

    def test_little_is_kept(self) -> None:
        watch = Watch(asked(1, answer="[f]"))
        for _ in range(1000):
            watch.feed("words of a thought ")
        assert len(watch.rest) < 8

    @pytest.mark.parametrize("cut", [1, 5, 100])
    def test_a_marker_that_is_not_at_the_beginning_is_text(self, cut: int) -> None:
        watch = Watch(asked(1, opened=False))
        for piece in re.findall(f"(?s).{{1,{cut}}}", "The tag <t> opens a thought. "):
            watch.feed(piece)
        assert (watch.thinking, watch.over) == (False, True)

    @pytest.mark.parametrize("opened", [True, False])
    @pytest.mark.parametrize("answer", ["", "[f]"])
    def test_it_goes_on_from_what_another_has_found(self, opened: bool, answer: str) -> None:
        """At every cut: that is how a prefill reaches the engine."""
        for text in ("<t>a < b </t</t> <t>c[f]<t>", " <tx", "a<t>b</t>[f", "<"):
            marks = asked(1, opened=opened, answer=answer)
            for at in range(len(text) + 1):
                first = Watch(marks, text[:at])
                again = Watch(asked(1, opened=first.thinking, answer=answer), first.rest)
                assert len(first.rest) < 8
                if first.over:
                    continue
                for watch in (first, again):
                    watch.feed(text[at:])
                assert (first.thinking, first.over, first.rest) == (again.thinking, again.over, again.rest), text[:at]
