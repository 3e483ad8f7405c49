"""What grammar backends around a library share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.grammar.api import GrammarContext, TokenizerViews, refused

TOKENIZER: Any = None
MODEL = GrammarContext(directory=Path("model"), tokenizer=TOKENIZER, vocab_size=10, eos_token_ids=frozenset({7, 3}))


def test_the_last_view_is_kept() -> None:
    made = []

    def make(directory: Path, vocab_size: int, ends: tuple[int, ...]) -> list[object]:
        made.append((directory, vocab_size, ends))
        return [directory]

    views = TokenizerViews("some_library", make)
    assert views.problem(MODEL) is None
    assert views.of(MODEL) is views.of(replace(MODEL))
    assert made == [(Path("model"), 10, (3, 7))]
    for other in (replace(MODEL, vocab_size=11), replace(MODEL, directory=Path("other")), MODEL):
        views.of(other)
    assert len(made) == 4


def test_why_a_library_cannot_serve_a_model() -> None:
    def make(directory: Path, vocab_size: int, ends: tuple[int, ...]) -> None:
        raise ValueError("there is no vocabulary")

    views = TokenizerViews("some_library", make)
    assert views.problem(MODEL) == "some_library cannot read the model's tokenizer: there is no vocabulary"
    assert views.problem(replace(MODEL, eos_token_ids=frozenset())) == "the model has no token that ends an answer"
    with pytest.raises(ValueError, match="no vocabulary"):
        views.of(MODEL)


def test_a_refusal_names_the_kind() -> None:
    for error in (refused(Grammar("regex", "("), "a group is open"), refused("regex", "a group is open")):
        assert (error.status, error.param, error.code) == (400, "regex", "invalid_grammar")
        assert error.message == "regex: a group is open"
