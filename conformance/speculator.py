"""The conformance suite of Speculator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.draft_checks import MOST, VOCAB, Int64s, check, count_steps, plain
from pegboard.conformance.properties import properties
from pegboard.conformance.speculator_device import DeviceTests
from pegboard.conformance.speculator_judging import JudgingTests
from pegboard.core.interfaces.layers import ModelSpec
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.speculator import DraftRow, DraftTrees, Speculator, SpeculatorContext
from pegboard.core.toolkit.speculation import tree


class Life:
    """A request of a known future, as the scheduler carries it on: what it says next, and how far it is."""

    def __init__(self, text: Sequence[int], input_len: int, namespace: str = "") -> None:
        self.text = np.array(text, np.int64)
        self.length = self.input_len = input_len
        self.namespace = namespace
        self.memo: dict[object, Any] = {}

    @property
    def done(self) -> bool:
        return self.length >= len(self.text)

    def row(self, most: int = MOST) -> DraftRow:
        """Return the request as it stands, in memory of the row's own, which may not be written to."""
        tokens = self.text[: self.length].copy()
        tokens.setflags(write=False)
        return DraftRow(tokens, self.input_len, self.namespace, most, self.memo)

    def drawn(self, depths: Int64s) -> Int64s:
        """Return what the model says after each node: the future, whatever was drafted."""
        return np.append(self.text, np.full(64, -1))[self.length + depths]


def step(speculator: Speculator, lives: Sequence[Life], mosts: Sequence[int]) -> DraftTrees:
    """Take one step with all of `lives`, as the pipeline does: propose, verify, go on, learn. Return the trees."""
    rows = [life.row(most) for life, most in zip(lives, mosts, strict=True)]
    trees = speculator.propose(rows)
    check(trees, rows)
    counts = []
    for place, life in enumerate(lives):
        own = tree.take_part(trees, np.array([place]))
        counts.append(int(tree.walk(own, life.drawn(tree.depths(own))).counts[0]))
        life.length = min(len(life.text), life.length + counts[-1])
    after = [life.row(most) for life, most in zip(lives, mosts, strict=True)]
    speculator.learn(after, trees.counts.copy(), np.array(counts, np.int64))
    return trees


class SpeculatorContract(DeviceTests, JudgingTests):
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
        return found

    # What the tests share.

    @pytest.fixture
    def speculator(self) -> Speculator:
        return self.new()

    def new(self, max_nodes: int = MOST) -> Speculator:
        if "device" in self.capabilities:
            return self.rig(max_nodes)
        spec = ModelSpec("suite", VOCAB, 16, 65536, (), (), frozenset({2}))
        made: Speculator = self.build(SpeculatorContext(spec, max_nodes))
        return made

    def lives(self) -> list[Life]:
        """Return a request for each text, each in a namespace of its own."""
        return [Life(text, prompt, f"tenant {number}") for number, (text, prompt) in enumerate(self.texts())]

    # Trees.

    @pytest.mark.parametrize("max_nodes", [2, 8, 64])
    def test_facts_do_not_change(self, max_nodes: int) -> None:
        speculator = self.new(max_nodes)
        before = speculator.max_nodes
        assert 1 <= before <= max_nodes, f"max_nodes is {before}, where at most {max_nodes} are allowed"
        for life in self.lives():
            while not life.done:
                step(speculator, [life], [max_nodes])
        assert speculator.max_nodes == before

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
                assert step(speculator, [life], [1]).counts.tolist() == [1]

    def test_something_is_drafted(self, speculator: Speculator) -> None:
        if speculator.max_nodes == 1:
            pytest.skip("it never drafts")
        nodes = 0
        for life in self.lives():
            while not life.done:
                nodes += int(step(speculator, [life], [MOST]).counts[0]) - 1
        if not nodes and type(self).texts is SpeculatorContract.texts:
            pytest.skip("override texts: the suite cannot know what this speculator drafts for")
        assert nodes, "nothing is ever drafted"

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
            assert speculator.concerns(params) in (True, False)

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

    # Cost.

    def test_work_does_not_grow_with_the_text(self) -> None:
        """How many steps of Python a call takes, after some calls. What a library does at once is not counted."""
        if "device" in self.capabilities:
            pytest.skip("see test_work_on_the_device_does_not_grow_with_the_text")
        costs: dict[int, list[int]] = {}
        for length in (2048, 32768):
            speculator = self.new()
            rng = np.random.default_rng(length)
            period = rng.integers(0, VOCAB, 601)
            life = Life(np.resize(period, length + 400).tolist(), length)
            for _ in range(24):
                step(speculator, [life], [MOST])
            costs[length] = []
            while life.length < length + 300:
                costs[length].append(count_steps(speculator.propose, [life.row()]))
                life.length += 3
        short, long = (int(np.median(found)) for found in costs.values())
        assert long <= 3 * short + 1000, f"{short} steps of Python at 2,048 tokens, {long} at 32,768: {_RESCAN}"


_MIXED_UP = (
    "a tree depends on more than its own request. Keep state in DraftRow.memo, never by place in the batch, and change "
    "it in `learn` or by the row's tokens, not by calls"
)
_AGAIN = "asked again for the same rows, it answers something else"
_LEAK = "what a request of another namespace has said shows in the drafts"
_VIEW = "it keeps a row's tokens, or answers with a view of them: copy what is needed"
_NOTES = "what is kept in a memo meets what others keep there: use the speculator itself as the key"
_RESCAN = "it goes through the whole text at each step. Keep what is known of it in DraftRow.memo, and add what is new"
