"""The suite of GrammarBackend on llguidance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pegboard.conformance.checkpoints import write_tiny_tokenizer
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.grammar.api import GrammarBackend, GrammarContext
from pegboard.plugins.grammar.suite import GrammarContract
from pegboard.plugins.grammar.suite.cases import EOS, WIDTH
from pegboard.plugins.grammar.suite.walks import bytes_of
from pegboard.plugins.grammar_llguidance.backend import LLGuidanceBackend
from pegboard.plugins.grammar_llguidance.options import LLGuidanceOptions
from pegboard.toolkit.text.tokenizer import Tokenizer


class TestLLGuidance(GrammarContract):
    provider = "llguidance"


def walk(backend: GrammarBackend, source: str, text: str) -> str:
    """The text through the masks, a byte's token at a time; how the matcher gives up, if it does."""
    grammar = Grammar("ebnf", source)
    matcher = backend.load(grammar, backend.compile(grammar)).matcher()
    mask = np.zeros((1, WIDTH // 32), np.int32)
    letters = {bytes_of(token): token for token in range(320) if len(bytes_of(token)) == 1}
    for char in text:
        try:
            matcher.fill(mask, 0)
            assert matcher.accept(letters[char.encode()])
        except InvalidRequest as why:
            return f"{why.status} {why.code}"
    return ""


class TestAmbiguity:
    """The work of a mask is bounded by counts, not by a clock; see decision 0019."""

    @pytest.fixture
    def backend(self, tmp_path: Path) -> GrammarBackend:
        write_tiny_tokenizer(tmp_path)
        ctx = GrammarContext(tmp_path, Tokenizer.from_directory(tmp_path), WIDTH, frozenset({EOS}))
        return LLGuidanceBackend(LLGuidanceOptions(), ctx)

    def test_it_is_the_clients_mistake_where_it_gets_too_much(self, backend: GrammarBackend) -> None:
        assert walk(backend, 'root ::= e "."\ne ::= e e e | e e | [a-z ]', "a" * 400) == "400 grammar_too_complex"

    @pytest.mark.parametrize(
        ("source", "text"),
        [
            ('root ::= text "."\ntext ::= [a-z ] text | [a-z ]', "lorem " * 200 + "."),
            ('root ::= item ("," root)?\nitem ::= [a-z] | "(" root ")"', "(ab,c),".replace("ab", "a,b") * 150 + "x"),
            ('root ::= e\ne ::= e "+" e | e "*" e | "(" e ")" | [0-9a-z]', "a*2+" * 20 + "(b)"),
        ],
        ids=["right recursion", "a list", "operators"],
    )
    def test_usual_grammars_stay_below(self, backend: GrammarBackend, source: str, text: str) -> None:
        assert walk(backend, source, text) == ""


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        ('root ::= "a"{0} "b"', "b", "a"),
        ('root ::= x{0,0} "b"\nx ::= [a-z]', "b", "a"),
        ('root ::= "(" root "c"{0} ")" | "b" "a"{0}', "((b))", "(a"),
    ],
)
def test_a_repetition_of_none(tmp_path: Path, source: str, good: str, bad: str) -> None:
    write_tiny_tokenizer(tmp_path)
    ctx = GrammarContext(tmp_path, Tokenizer.from_directory(tmp_path), WIDTH, frozenset({EOS}))
    backend = LLGuidanceBackend(LLGuidanceOptions(), ctx)
    assert walk(backend, source, good) == ""
    with pytest.raises(AssertionError):
        walk(backend, source, bad)
