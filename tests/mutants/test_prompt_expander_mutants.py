"""Broken prompt expanders, each caught by the test of the suite that is meant for it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence

import numpy as np
import pytest

from pegboard.conformance.prompt_expander import PromptExpanderContract
from pegboard.core.interfaces.client import AnnotatedPrompt
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.frontend import Expand, Expanded, PromptExpander, TokenIds

PLACE = 99


class Beads(AnnotatedPrompt, kw_only=True):
    """A prompt with numbers, each of which stands for that many tokens."""

    counts: tuple[int, ...] = ()

    @property
    def items(self) -> tuple[int, ...]:
        return self.counts


class Box:
    """Counts who holds it."""

    def __init__(self) -> None:
        self.holders = 0

    def keep(self) -> None:
        self.holders += 1

    def drop(self) -> None:
        self.holders -= 1


class Good(PromptExpander):
    def __init__(self) -> None:
        self.box = Box()

    def check(self, prompt: AnnotatedPrompt) -> None: ...

    def takes(self, prompt: object, ids: TokenIds) -> bool:
        counts = prompt.counts if isinstance(prompt, Beads) else ()
        if int((ids == PLACE).sum()) != len(counts):
            raise InvalidRequest("as many places as items")
        return bool(counts)

    @contextlib.asynccontextmanager
    async def prepared(self, prompts: Sequence[object], asker: str) -> AsyncIterator[list[Expand]]:
        with self.prepared_now(prompts) as expands:
            yield expands

    @contextlib.contextmanager
    def prepared_now(self, prompts: Sequence[object]) -> Iterator[list[Expand]]:
        self.box.keep()
        try:
            yield [lambda ids, one=prompt: self.expand(ids, one) for prompt in prompts]  # type: ignore[misc]
        finally:
            self.box.drop()

    def expand(self, ids: TokenIds, prompt: Beads) -> Expanded | None:
        found: list[int] = []
        counts = iter(prompt.counts)
        for token in ids.tolist():
            found += [PLACE] * next(counts) if token == PLACE else [token]
        return Expanded(np.array(found, np.int64), list(prompt.counts), {"bead": sum(prompt.counts)}, held=(self.box,))


class TakesAll(Good):
    def takes(self, prompt: object, ids: TokenIds) -> bool:
        return True


class RefusesNothing(Good):
    def takes(self, prompt: object, ids: TokenIds) -> bool:
        return isinstance(prompt, Beads)


class ForgetsOne(Good):
    @contextlib.contextmanager
    def prepared_now(self, prompts: Sequence[object]) -> Iterator[list[Expand]]:
        with super().prepared_now(prompts[:1]) as expands:
            yield expands


class HoldsForEver(Good):
    @contextlib.contextmanager
    def prepared_now(self, prompts: Sequence[object]) -> Iterator[list[Expand]]:
        self.box.keep()
        with super().prepared_now(prompts) as expands:
            yield expands


class ChangesTokens(Good):
    def expand(self, ids: TokenIds, prompt: Beads) -> Expanded | None:
        found = super().expand(ids, prompt)
        ids[0] = 0
        return found


class TellsNoTokens(Good):
    def expand(self, ids: TokenIds, prompt: Beads) -> Expanded | None:
        found = super().expand(ids, prompt)
        return found and Expanded(found.ids, found.feature, held=found.held)


class Suite(PromptExpanderContract):
    __test__ = False

    def __init__(self, kind: type[Good]) -> None:
        self.kind = kind

    def make_expander(self) -> PromptExpander:
        return self.kind()

    def prompt(self) -> tuple[AnnotatedPrompt, list[int]]:
        ids = [5, PLACE, 6]
        return Beads(base=ids, counts=(3,)), ids

    def lost(self, expander: PromptExpander) -> object:
        assert isinstance(expander, Good)
        return expander.box.holders


EACH = "test_each_prompt_gets_its_items"
MUTANTS: list[tuple[type[Good], str, str]] = [
    (TakesAll, "test_a_prompt_without_items_is_none_of_its_business", "which has no items"),
    (RefusesNothing, "test_items_without_their_places_are_refused", "DID NOT RAISE"),
    (ForgetsOne, EACH, "1 of them expanded"),
    (HoldsForEver, EACH, "something is held"),
    (ChangesTokens, EACH, "has changed the tokens"),
    (TellsNoTokens, EACH, "more tokens than"),
]


def run(kind: type[Good], test: str) -> None:
    suite = Suite(kind)
    for now in (True, False) if test == EACH else (None,):
        getattr(suite, test)(*(() if now is None else (now,)))


@pytest.mark.parametrize(("mutant", "test", "says"), MUTANTS, ids=lambda one: getattr(one, "__name__", None))
def test_caught(mutant: type[Good], test: str, says: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception), match=says):
        run(mutant, test)


@pytest.mark.parametrize("test", sorted({test for _, test, _ in MUTANTS}))
def test_a_good_one_passes(test: str) -> None:
    run(Good, test)
