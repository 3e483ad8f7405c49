"""The conformance suite of Speculator."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.properties import properties
from pegboard.conformance.suite import ConformanceWarning
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.plugins.speculation.api import Speculator
from pegboard.plugins.speculation.suite.checks import MOST, VOCAB, check, plain
from pegboard.plugins.speculation.suite.conduct import ConductTests
from pegboard.plugins.speculation.suite.judging import JudgingTests
from pegboard.plugins.speculation.suite.rig import Life, step
from pegboard.toolkit.sampling import tree

__all__ = ["Life", "SpeculatorContract", "step"]


class SpeculatorContract(ConductTests, JudgingTests):
    """What every speculator owes the scheduler: well-formed trees, that depend on their own request alone."""

    contract = "speculator"

    def texts(self) -> Sequence[tuple[Sequence[int], int]]:
        """Return texts below `VOCAB`, each with how many tokens of it are the prompt, for which something is drafted at
        times. By default they quote themselves; those for speculators that draft on the device are short. Override this
        where something else is needed.
        """
        if "device" in self.capabilities:
            return self.short_texts()
        rng = np.random.default_rng(7)
        found = []
        for prompt, output in ((40, 80), (9, 120), (1, 60), (90, 30)):
            text = rng.integers(0, VOCAB, prompt + output)
            for at in range(20, prompt + output - 12, 19):
                start = int(rng.integers(0, at - 12))
                text[at : at + 12] = text[start : start + 12]
            found.append((text.tolist(), prompt))
        # Each token has been there before, and hardly ever what follows now: most drafts fail.
        return [*found, (rng.integers(0, 3, 90).tolist(), 30)]

    # Trees.

    @pytest.mark.parametrize("max_nodes", [2, 8, 64])
    def test_facts_do_not_change(self, max_nodes: int) -> None:
        speculator = self.new(max_nodes)
        before = speculator.max_nodes
        assert 1 <= before <= max_nodes, f"max_nodes is {before}, where at most {max_nodes} are allowed"
        for life in self.lives():
            while not life.done:
                step(speculator, [life], [max_nodes])
        now = speculator.max_nodes
        assert now == before, f"max_nodes was {before} when it was built and is {now} now: it has to stay"

    @pytest.mark.parametrize("seed", range(3))
    def test_trees_are_well_formed(self, seed: int) -> None:
        """Requests come and go from step to step, and are allowed more or fewer nodes."""
        rng = np.random.default_rng(seed)
        speculator = self.new(16)
        lives = self.lives()
        while lives := [life for life in lives if not life.done]:
            some = [lives[place] for place in rng.permutation(len(lives))[: rng.integers(1, len(lives) + 1)]]
            trees = step(speculator, some, rng.integers(1, 17, len(some)).tolist())
            assert (trees.counts <= speculator.max_nodes).all(), "a tree has more than max_nodes nodes"
            if "branches" not in self.capabilities:
                assert tree.is_chain(trees), "a tree has branches, and the capability `branches` is not declared"

    def test_one_node_is_no_draft(self, speculator: Speculator) -> None:
        for life in self.lives():
            while not life.done:
                counts = step(speculator, [life], [1]).counts.tolist()
                assert counts == [1], f"a row with most=1 has room for its root alone, but its tree has {counts} nodes"

    def test_something_is_drafted(self, speculator: Speculator) -> None:
        if speculator.max_nodes == 1:
            pytest.skip("it never drafts")
        nodes, useless, lives = 0, [], self.lives()
        own = type(self).texts is not SpeculatorContract.texts
        for life in lives:
            accepted = 0
            while not life.done:
                before = life.length
                nodes += int(step(speculator, [life], [MOST]).counts[0]) - 1
                accepted += life.length - before - 1
            if accepted <= 0 and (own or life is not lives[-1]):
                useless.append(f"{len(life.text)} tokens, {life.input_len} of them the prompt")
        if not nodes and not own:
            warnings.warn(ConformanceWarning(f"nothing was drafted. {_USELESS.format(_REPEAT)}"), stacklevel=1)
            pytest.skip("override texts: the suite cannot know what this speculator drafts for")
        assert nodes, "nothing is ever drafted"
        if "device" not in self.capabilities and (not own or len(useless) == len(lives)) and useless:
            what = "these texts" if own else _REPEAT
            warnings.warn(ConformanceWarning(f"{_USELESS.format(what)}: {'; '.join(useless)}"), stacklevel=1)

    def test_numbers_in_place_of_media_are_not_drafted(self, speculator: Speculator) -> None:
        """Prompts may hold numbers far beyond the vocabulary; the model never says any."""
        strange = [10**15, VOCAB, 3, 4, 10**15 + 1]
        text = [3, 4, *strange, 5, 3, 4, *strange, 5, 3, 4, 5, 3, 4]
        for prompt in range(8, len(text)):
            life = Life(text, prompt)
            row = life.row()
            if row.tokens[-1] < VOCAB:
                check(speculator.propose([row]), [row])

    def test_the_batch_may_be_empty(self, speculator: Speculator) -> None:
        trees = speculator.propose([])
        check(trees, [])
        speculator.learn([], np.empty(0, np.int64), np.empty(0, np.int64))

    def test_concerns_says_yes_or_no(self, speculator: Speculator) -> None:
        for params in (SamplingParams(), SamplingParams(temperature=0.0, seed=4, max_new_tokens=None)):
            found = speculator.concerns(params)
            assert found in (True, False), f"concerns answers {found!r}: return True or False"

    # What a tree depends on.

    @properties(max_examples=12)
    @given(data=st.data())
    def test_other_rows_do_not_matter(self, data: st.DataObject) -> None:
        """In any batch and order a request gets what it gets alone; another instance sees it alone."""
        speculator = self.new()
        pairs = [(life, alone, self.new()) for life, alone in zip(self.lives(), self.lives(), strict=True)]
        for life, alone, _ in pairs:
            life.length = alone.length = data.draw(st.integers(life.length, len(life.text) - 1))
        for _ in range(data.draw(st.integers(1, 12))):
            order = data.draw(st.permutations([pair for pair in pairs if not pair[0].done]))
            some = order[: data.draw(st.integers(1, 4))]
            mosts = [data.draw(st.sampled_from([2, 5, MOST])) for _ in some]
            together = plain(step(speculator, [life for life, _, _ in some], mosts))
            for found, most, (_, alone, own) in zip(together, mosts, some, strict=True):
                assert found == plain(step(own, [alone], [most]))[0], _MIXED_UP

    def test_a_step_may_be_repeated(self, speculator: Speculator) -> None:
        """A batch that failed is run again, in halves."""
        lives = self.lives()
        while lives := [life for life in lives if not life.done]:
            rows = [life.row() for life in lives]
            first = plain(speculator.propose(rows))
            half = len(rows) // 2
            again = plain(speculator.propose(rows[half:])) + plain(speculator.propose(rows[:half]))
            assert again[len(rows) - half :] + again[: len(rows) - half] == first, f"{_AGAIN}. {_MIXED_UP}"
            step(speculator, lives, [MOST] * len(lives))

    def test_nothing_is_learnt_across_namespaces(self) -> None:
        """Requests of one namespace say what those of another one begin to: their drafts are what they would be."""
        for text, prompt in self.texts():
            knows, new = self.new(), self.new()
            for input_len in (prompt, 1):
                life = Life(text, input_len, "alice")
                while not life.done:
                    step(knows, [life], [MOST])
            there, here = Life(text, prompt, "bob"), Life(text, prompt, "bob")
            while not here.done:
                found, expected = (plain(step(one, [life], [MOST])) for one, life in ((knows, there), (new, here)))
                assert found == expected, f"{_LEAK}: with it {found}, without it {expected}"

    def test_rows_are_not_kept(self) -> None:
        """Memory that tokens were in is something else's by the next call. What was answered stays, too."""
        speculator, other = self.new(), self.new()
        for life, same in zip(self.lives(), self.lives(), strict=True):
            while not life.done:
                row = life.row()
                trees = speculator.propose([row])
                expected = plain(other.propose([same.row()]))
                row.tokens.setflags(write=True)
                row.tokens[:] = np.roll(row.tokens, 1)[::-1] // 2
                assert plain(trees) == expected, _VIEW
                life.length = same.length = life.length + 1

    def test_notes_of_others_stay(self, speculator: Speculator) -> None:
        """A request's memo has things of others in it, another instance of the same class among them."""
        other, stranger = self.new(), object()
        for life, alone in zip(self.lives(), self.lives(), strict=True):
            life.memo[stranger] = "else"
            while not life.done:
                row = life.row()
                found = [plain(one.propose([row])) for one in (speculator, other)]
                assert found[0] == found[1] == plain(speculator.propose([alone.row()])), _NOTES
                assert life.memo[stranger] == "else", _NOTES
                life.length = alone.length = life.length + 1


_MIXED_UP = (
    "a tree depends on more than its own request. Keep state in DraftRow.memo, never by place in the batch, and change "
    "it in `learn` or by the row's tokens, not by calls"
)
_AGAIN = "asked again for the same rows, it answers something else"
_LEAK = "what a request of another namespace has said shows in the drafts"
_VIEW = "it keeps a row's tokens, or answers with a view of them: copy what is needed"
_NOTES = "what is kept in a memo meets what others keep there: use the speculator itself as the key"
_REPEAT = "texts that repeat what they said"
_USELESS = (
    "no draft was ever accepted for {}. A draft's first token is what follows the newest one, and what counts is "
    "prompt and output"
)
