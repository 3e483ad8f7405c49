"""Broken speculators, and the tests of the suite that notice."""

from __future__ import annotations

import functools
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.conformance.suite import ConformanceWarning
from pegboard.core.interfaces.trees import TokenTrees
from pegboard.plugins.spec_ngram.speculator import NgramSpeculator
from pegboard.plugins.speculation.suite import SpeculatorContract
from pegboard.toolkit.sampling.tree import chains, join


class DraftingSuite(SpeculatorContract):
    """That of an author who says for which texts something is drafted."""

    def texts(self):
        return super().texts()


class Grows(NgramSpeculator):
    """What it says of itself changes as it works."""

    def learn(self, rows, offered, gained):
        super().learn(rows, offered, gained)
        self.max_nodes = max(2, self.max_nodes - 1)


class SaysMoreThanItMay(NgramSpeculator):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.max_nodes = 64


class ForgetsTheBound(NgramSpeculator):
    """Always as many nodes as it ever may."""

    def propose(self, rows):
        return super().propose([replace(row, most=self.max_nodes) for row in rows])


class DraftsOneAnyway(NgramSpeculator):
    def propose(self, rows):
        return super().propose([replace(row, most=max(2, row.most)) for row in rows])


class LeavesOutTheRoot(NgramSpeculator):
    def propose(self, rows):
        trees = super().propose(rows)
        return replace(trees, tokens=np.roll(trees.tokens, 1))


class AnswersInInt32(NgramSpeculator):
    def propose(self, rows):
        trees = super().propose(rows)
        return replace(trees, parents=trees.parents.astype(np.int32))


class Branches(NgramSpeculator):
    """Drafts with two tokens in one place, without a word about it."""

    def propose(self, rows):
        trees = super().propose(rows)
        if len(rows) != 1 or trees.counts[0] != 3 or trees.tokens[1] == trees.tokens[2]:
            return trees
        return replace(trees, parents=np.array([-1, 0, 0]))


class DraftsNothing(NgramSpeculator):
    def propose(self, rows):
        return chains((int(row.tokens[-1]), ()) for row in rows)


class DraftsHashes(NgramSpeculator):
    """Whatever followed, also where it is no token."""

    def _draft(self, row):
        found = np.flatnonzero(row.tokens[:-1] == row.tokens[-1])
        return row.tokens[found[-1] + 1 :][: row.most - 1].tolist() if len(found) else []


class NeedsARow(NgramSpeculator):
    def propose(self, rows):
        return join([super(NeedsARow, self).propose([row]) for row in rows]) if len(rows) > 1 else self.one(rows[0])

    def one(self, row):
        return super().propose([row])


class ConcernsNothingClearly(NgramSpeculator):
    def concerns(self, params):
        return None


class KeepsNotesByPlace(NgramSpeculator):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.memos: list[dict[object, object]] = [{} for _ in range(64)]

    def propose(self, rows):
        return super().propose([replace(row, memo=memo) for row, memo in zip(rows, self.memos, strict=False)])


class SharesTheNodes(NgramSpeculator):
    """So many nodes for all rows together."""

    def propose(self, rows):
        share = 1 + self.max_nodes // max(1, len(rows))
        return super().propose([replace(row, most=min(row.most, share)) for row in rows])


class CountsItsCalls(NgramSpeculator):
    """Every other call drafts."""

    calls = 0

    def propose(self, rows):
        self.calls += 1
        return super().propose([replace(row, most=row.most if self.calls % 2 else 1) for row in rows])


class SharesAcrossNamespaces(NgramSpeculator):
    def propose(self, rows):
        return super().propose([replace(row, namespace="") for row in rows])


class KeepsTheTokens(NgramSpeculator):
    """Looks in the memory that it was given the first time."""

    def propose(self, rows):
        kept = []
        for row in rows:
            before = row.memo.setdefault("kept", row.tokens)
            kept.append(replace(row, tokens=np.concatenate([before, row.tokens[len(before) :]])))
        trees = super().propose(kept)
        roots = np.flatnonzero(trees.parents < 0)
        trees.tokens[roots] = [row.tokens[-1] for row in rows]
        return trees


class AnswersWithAView(NgramSpeculator):
    def propose(self, rows):
        if len(rows) != 1:
            return super().propose(rows)
        return TokenTrees(np.array([1]), rows[0].tokens[-1:], np.array([-1]))


class KeepsNotesUnderItsClass(NgramSpeculator):
    """Two instances count in one place."""

    def propose(self, rows):
        for row in rows:
            row.memo["asked"] = row.memo.get("asked", 0) + 1
        return super().propose([replace(row, most=1 + row.memo["asked"] % row.most) for row in rows])


class ClearsTheMemo(NgramSpeculator):
    def propose(self, rows):
        for row in rows:
            row.memo.clear()
        return super().propose(rows)


class GoesThroughTheText(NgramSpeculator):
    def propose(self, rows):
        for row in rows:
            assert sum(1 for token in row.tokens.tolist() if token < 0) == 0
        return super().propose(rows)


class Naps(NgramSpeculator):
    """As one does that asks a model of its own, and waits."""

    def propose(self, rows):
        time.sleep(0.001)
        return super().propose(rows)


class WaitsForItsHelper(NgramSpeculator):
    def learn(self, rows, offered, gained):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(super().learn, rows, offered, gained).result()


class BeginsAnew(NgramSpeculator):
    """No call does more than so much, and each does it again."""

    def propose(self, rows):
        for row in rows:
            row.memo[self, "index"] = dict(zip(*[iter(row.tokens[-4096:].tolist())] * 2, strict=False))
            for place in range(min(4096, len(row.tokens))):
                row.memo[self, "index"][place] = place
        return super().propose(rows)


class LearnsTheTextAnew(NgramSpeculator):
    def learn(self, rows, offered, gained):
        for row in rows:
            assert sum(1 for token in row.tokens if token < 0) == 0
        super().learn(rows, offered, gained)


class CopiesTheText(NgramSpeculator):
    """In a library, which Python does not see."""

    def propose(self, rows):
        return super().propose([replace(row, tokens=np.array(row.tokens.tolist(), np.int64)) for row in rows])


class TakesOnAnyPrompt(NgramSpeculator):
    """Once for each request, however long it is."""

    def propose(self, rows):
        for row in rows:
            if (self, "index") not in row.memo:
                row.memo[self, "index"] = {token: place for place, token in enumerate(row.tokens.tolist())}
        return super().propose(rows)


class KeepsNotesById(NgramSpeculator):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.memos = {}

    def propose(self, rows):
        return super().propose([replace(row, memo=self.memos.setdefault(id(row.memo), {})) for row in rows])


class SharesItsNotes(NgramSpeculator):
    """Between all instances, and under what the text begins with."""

    notes: ClassVar[dict[object, dict[str, int]]] = {}

    def propose(self, rows):
        memos = [self.notes.setdefault((row.namespace, row.tokens[:1].tobytes()), {}) for row in rows]
        for memo in memos:
            memo["asked"] = memo.get("asked", 0) + 1
        most = [1 + memo["asked"] % 200 // 100 * row.most for memo, row in zip(memos, rows, strict=True)]
        return super().propose([replace(row, most=min(row.most, nodes)) for row, nodes in zip(rows, most, strict=True)])


class GivesUpForAll(NgramSpeculator):
    """After drafts that failed, whosever they were."""

    failed = 0

    def learn(self, rows, offered, gained):
        super().learn(rows, offered, gained)
        self.failed = 0 if gained[-1] > 1 else self.failed + (offered[-1] > 1)

    def propose(self, rows):
        return super().propose([replace(row, most=1 if self.failed > 1 else row.most) for row in rows])


class CachesWithoutABound(NgramSpeculator):
    @functools.lru_cache(maxsize=None)  # noqa: B019, UP033
    def size_of(self, namespace):
        return len(namespace)

    def propose(self, rows):
        assert all(self.size_of(row.namespace) >= 0 for row in rows)
        return super().propose(rows)


class KeepsWhatItLearnt(NgramSpeculator):
    """Of each namespace, for ever."""

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.rates = {}

    def learn(self, rows, offered, gained):
        super().learn(rows, offered, gained)
        self.rates.update((row.namespace, gained.tolist()) for row in rows)


class WritesItsFigures(NgramSpeculator):
    def learn(self, rows, offered, gained):
        with Path(tempfile.gettempdir(), "figures").open("a") as file:
            file.write(f"{gained.sum()}")
        super().learn(rows, offered, gained)


class BeginsATokenEarly(NgramSpeculator):
    def _draft(self, row):
        return [row.tokens.item(-1), *super()._draft(row)][: row.most - 1]


class SeesThePromptAlone(NgramSpeculator):
    def propose(self, rows):
        return super().propose([row if len(row.tokens) % 2 else replace(row, most=1) for row in rows])

    def _draft(self, row):
        prompt = row.tokens[: row.input_len]
        found = np.flatnonzero(prompt[:-1] == row.tokens[-1])
        return prompt[found[-1] + 1 :][: row.most - 1].tolist() if len(found) else []


SHARED = {"shared": True}
MUTANTS = [
    Mutant(cls, suite=DraftingSuite, caught_by=test, options=options, says=says)
    for cls, test, options, says in [
        (Grows, "test_facts_do_not_change", {}, ""),
        (SaysMoreThanItMay, "test_facts_do_not_change", {}, "at most 2 are allowed"),
        (ForgetsTheBound, "test_trees_are_well_formed", {}, "are allowed"),
        (LeavesOutTheRoot, "test_trees_are_well_formed", {}, "a root is not the newest token"),
        (AnswersInInt32, "test_trees_are_well_formed", {}, "not int64"),
        (Branches, "test_trees_are_well_formed", {}, "`branches` is not declared"),
        (DraftsOneAnyway, "test_one_node_is_no_draft", {}, ""),
        (DraftsNothing, "test_something_is_drafted", {}, ""),
        (DraftsHashes, "test_numbers_in_place_of_media_are_not_drafted", {}, "none of the vocabulary's"),
        (NeedsARow, "test_the_batch_may_be_empty", {}, ""),
        (ConcernsNothingClearly, "test_concerns_says_yes_or_no", {}, ""),
        (KeepsNotesByPlace, "test_other_rows_do_not_matter", {}, "Keep state in DraftRow.memo"),
        (SharesTheNodes, "test_other_rows_do_not_matter", {}, "more than its own request"),
        (CountsItsCalls, "test_a_step_may_be_repeated", {}, "asked again"),
        (SharesAcrossNamespaces, "test_nothing_is_learnt_across_namespaces", SHARED, "another namespace"),
        (KeepsTheTokens, "test_rows_are_not_kept", {}, ""),
        (AnswersWithAView, "test_rows_are_not_kept", {}, "with a view"),
        (KeepsNotesUnderItsClass, "test_notes_of_others_stay", {}, "the speculator itself as the key"),
        (ClearsTheMemo, "test_notes_of_others_stay", {}, ""),
        (GoesThroughTheText, "test_work_does_not_grow_with_the_text", {}, "the whole text at each step"),
        (LearnsTheTextAnew, "test_work_does_not_grow_with_the_text", {}, "the whole text at each step"),
        (BeginsAnew, "test_work_does_not_grow_with_the_text", {}, "the whole text at each step"),
        (CopiesTheText, "test_work_does_not_grow_with_the_text", {}, "it copies the text"),
        (TakesOnAnyPrompt, "test_work_on_a_long_prompt_is_bounded", {}, "take on so many tokens per call"),
        (Naps, "test_no_call_waits", {}, "propose blocks in time.sleep"),
        (WaitsForItsHelper, "test_no_call_waits", {}, "learn blocks in Thread.join"),
        (SharesItsNotes, "test_instances_know_nothing_of_each_other", {}, "another instance of the class"),
        (GivesUpForAll, "test_other_rows_do_not_matter", {}, "more than its own request"),
        (WritesItsFigures, "test_no_call_waits", {}, "learn blocks in open("),
        (KeepsNotesById, "test_a_memo_may_lie_where_another_one_lay", {}, "the id() of its memo"),
        (CachesWithoutABound, "test_requests_are_let_go", {}, "bytes more are kept"),
        (KeepsWhatItLearnt, "test_requests_are_let_go", {}, "bytes more are kept"),
    ]
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)


@pytest.mark.parametrize("useless", [BeginsATokenEarly, SeesThePromptAlone])
def test_drafts_that_are_never_accepted_are_told(useless: type[NgramSpeculator]) -> None:
    """By a warning: they cost time, and break nothing."""
    suite = type("Useless", (SpeculatorContract,), {"factory": useless})()
    with pytest.warns(ConformanceWarning, match="no draft was ever accepted for texts that repeat"):
        suite.test_something_is_drafted(suite.new())
    suite = type("Useful", (SpeculatorContract,), {"factory": NgramSpeculator})()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConformanceWarning)
        suite.test_something_is_drafted(suite.new())
