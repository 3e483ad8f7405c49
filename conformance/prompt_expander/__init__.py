"""The conformance suite of prompt expanders: items of prompts in the place of tokens.

A class says what the expander is, and a prompt with items for it::

    class TestMine(PromptExpanderContract):
        def make_expander(self) -> PromptExpander: ...
        def prompt(self) -> tuple[AnnotatedPrompt, list[int]]: ...  # with items, and its tokens before they are placed
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from pegboard.core.interfaces.client import AnnotatedPrompt
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.frontend import Expand, Expanded, PromptExpander

PLAIN = [1, 2, 3]


class PromptExpanderContract(abc.ABC):
    @abc.abstractmethod
    def make_expander(self) -> PromptExpander:
        """Return the expander, for an engine that takes all that it can."""

    @abc.abstractmethod
    def prompt(self) -> tuple[AnnotatedPrompt, list[int]]:
        """Return a prompt with items, and the tokens of its text."""

    def lost(self, expander: PromptExpander) -> object:
        """Return what would show that something is held that no request needs: equal before and after."""
        return None

    def test_a_prompt_without_items_is_none_of_its_business(self) -> None:
        expander = self.make_expander()
        for prompt in ("abc", PLAIN, AnnotatedPrompt(base=PLAIN)):
            assert not expander.takes(prompt, np.array(PLAIN)), f"it takes {prompt!r}, which has no items"

    def test_items_without_their_places_are_refused(self) -> None:
        expander, (prompt, _) = self.make_expander(), self.prompt()
        with pytest.raises(InvalidRequest):
            expander.takes(prompt, np.array(PLAIN))

    @pytest.mark.parametrize("now", [True, False])
    def test_each_prompt_gets_its_items(self, now: bool) -> None:
        expander, (prompt, ids) = self.make_expander(), self.prompt()
        array = np.array(ids)
        expander.check(prompt)
        assert expander.takes(prompt, array), "it leaves a prompt with items alone"
        before = self.lost(expander)
        found = self._expanded(expander, [prompt, prompt], array, now=now)
        assert len(found) == 2, f"2 prompts, and {len(found)} of them expanded"
        for one in found:
            assert one.ids.dtype == np.int64, f"ids are int64, not {one.ids.dtype}"
            assert len(one.ids) - sum(one.tokens.values()) <= len(ids), "more tokens than `tokens` says are new"
            msgspec.msgpack.encode(one.feature)
        assert array.tolist() == ids, "it has changed the tokens that it was given"
        assert found[0].ids.tolist() == found[1].ids.tolist()
        assert self.lost(expander) == before, "something is held after all that asked for it has ended"

    def _expanded(
        self, expander: PromptExpander, prompts: Sequence[AnnotatedPrompt], ids: np.ndarray, *, now: bool
    ) -> list[Expanded]:
        """Return what becomes of prompts, once requests that held it have ended."""

        def taken(expands: Sequence[Expand]) -> list[Expanded]:
            found = [one for expand in expands if (one := expand(ids)) is not None]
            for held in (held for expanded in found for held in expanded.held):
                held.keep()
            return found

        async def beside() -> list[Expanded]:
            async with expander.prepared(prompts, "") as expands:
                return taken(expands)

        if now:
            with expander.prepared_now(prompts) as expands:
                found = taken(expands)
        else:
            found = asyncio.run(beside())
        for held in (held for expanded in found for held in expanded.held):
            held.drop()
        return found
