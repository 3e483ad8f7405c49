"""Broken logits processors, and the tests of the suite that notice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from pegboard.conformance.logits_processor import LogitsProcessorContract
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.logits_processor import LogitsProcessor
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.plugins.logits_basic.penalties import Penalties
from pegboard.plugins.logits_basic.processors import LogitBias, MinNewTokens
from pegboard.toolkit.sampling.custom_params import read_params
from pegboard.toolkit.sampling.logit_pairs import LAST_RESORT


class PenaltySuite(LogitsProcessorContract):
    def asking(self) -> Sequence[SamplingParams]:
        return [SamplingParams(repetition_penalty=1.3), SamplingParams(frequency_penalty=0.7, presence_penalty=-0.3)]


class BiasSuite(LogitsProcessorContract):
    def asking(self) -> Sequence[SamplingParams]:
        return [SamplingParams(logit_bias={97: 2.5, 3: -100.0}), SamplingParams(logit_bias={0: 1.0})]


class MinimumSuite(LogitsProcessorContract):
    def asking(self) -> Sequence[SamplingParams]:
        return [SamplingParams(min_new_tokens=5), SamplingParams(min_new_tokens=12, stop_token_ids=(97,))]


class Own(msgspec.Struct, forbid_unknown_fields=True):
    every: int = 2


class Counter(LogitsProcessor):
    """A small processor with a parameter and a memory: forbids token 5 after every so many tokens."""

    def wants(self, params: SamplingParams) -> bool:
        own = read_params(params, "counter", Own)
        if own is not None and own.every < 1:
            raise InvalidRequest("every must be at least 1", param="custom_params.counter.every")
        return own is not None

    def prepare(self, rows):
        hit = [place for place, row in enumerate(rows) if self.wants(row.params) and self.due(row)]
        return torch.tensor(hit) if hit else None

    def due(self, row):
        seen, count = row.memo.get(self, (0, 0))
        count += int((row.output_ids[seen:] == 97).sum())
        row.memo[self] = (len(row.output_ids), count)
        return count % row.params.extra["counter"].get("every", 2) == 0

    def apply(self, logits, state):
        logits[state, 5] = LAST_RESORT


class CounterSuite(LogitsProcessorContract):
    def asking(self) -> Sequence[SamplingParams]:
        return [SamplingParams(extra={"counter": {"every": every}}) for every in (1, 3)]


class WantsEverybody(Penalties):
    def wants(self, params):
        return True


class WantsNobody(MinNewTokens):
    def wants(self, params):
        return False


class DoesNothing(LogitBias):
    def apply(self, logits, state):
        pass


class ChangesEveryRow(LogitBias):
    def apply(self, logits, state):
        logits[:, state.ids] += state.numbers


class BiasOfTheFirstBatch(LogitBias):
    """Gathered once, for whoever was there."""

    def prepare(self, rows):
        if self._state is None:
            self._state = self._gather([row.params for row in rows])
        return self._state


class CountsWhatItHasPrepared(Counter):
    """By its calls and not by the row's tokens."""

    def due(self, row):
        count = row.memo.get(self, 0) + 1
        row.memo[self] = count
        return count % 2 == 0


class RemembersInPlaces(Counter):
    """By the row's place in the batch, which is another request's in the next step."""

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self._memos = {}

    def prepare(self, rows):
        return super().prepare([replace(row, memo=self._memos.setdefault(place, {})) for place, row in enumerate(rows)])


class SharesItsMemory(Counter):
    """Instances find each other's notes."""

    def due(self, row):
        seen, count = row.memo.get("counter", (0, 0))
        count += int((row.output_ids[seen:] == 97).sum())
        row.memo["counter"] = (len(row.output_ids), count)
        seen, notes = row.memo.get("calls", (None, 0))
        row.memo["calls"] = (self, notes + (seen is not None and seen is not self))
        return (count + row.memo["calls"][1]) % 2 == 0


class CountsRepeats(Counter):
    """A step that is run again counts again."""

    def due(self, row):
        count = row.memo.get(self, 0) + int((row.output_ids[-1:] == 97).sum())
        row.memo[self] = count
        return count % row.params.extra["counter"].get("every", 2) == 0


class KeepsTheViews(Counter):
    """Reads the rows in `apply`, when they may be gone."""

    def prepare(self, rows):
        kept = [(place, row) for place, row in enumerate(rows) if self.wants(row.params)]
        return kept or None

    def apply(self, logits, state):
        hit = [place for place, row in state if self.due(replace(row, memo={}))]
        logits[hit, 5] = -torch.inf


class AppliesTheLastStep(Penalties):
    """One step behind."""

    _last = None

    def prepare(self, rows):
        now = super().prepare(rows)
        behind, self._last = self._last, now
        return behind


class CountsKnownTokensOnly(MinNewTokens):
    def prepare(self, rows):
        return super().prepare([replace(row, pending=0) for row in rows])


class TakesHashesForTokens(Penalties):
    def prepare(self, rows):
        for row in rows:
            np.zeros(self.ctx.vocab_size)[row.prompt_ids]
        return super().prepare(rows)


class SubtractsTheMaximum(LogitBias):
    def apply(self, logits, state):
        logits[state.rows] -= logits[state.rows].amin(-1, keepdim=True)
        super().apply(logits, state)


class NeedsARow(MinNewTokens):
    def prepare(self, rows):
        rows[0]
        return super().prepare(rows)


class WritesToTheRows(Penalties):
    def prepare(self, rows):
        for row in rows:
            row.output_ids.sort()
        return super().prepare(rows)


class TakesAnyParameter(Counter):
    def wants(self, params):
        return "counter" in params.extra


class NamesNoParameter(Counter):
    def wants(self, params):
        try:
            return super().wants(params)
        except InvalidRequest as error:
            raise InvalidRequest(error.message) from None


class ReadsWhatIsMeantForOthers(Counter):
    def wants(self, params):
        return bool(params.extra)


class ForbidsEverything(Counter):
    def apply(self, logits, state):
        logits[state] = -torch.inf


class RulesOutBesideAGrammar(Counter):
    def apply(self, logits, state):
        logits[state, 5] = -torch.inf


class CountsItsCalls(Counter):
    """One count for all requests, of all steps."""

    steps = 0

    def due(self, row):
        return self.steps % row.params.extra["counter"].get("every", 2) == 0

    def apply(self, logits, state):
        self.steps += 1
        super().apply(logits, state)


class MixesUpTheRows(LogitBias):
    """The numbers of the rows that take part, in another order."""

    def apply(self, logits, state):
        logits[state.rows, state.ids] += state.numbers.flip(0)


class CountsRowsThatTakePart(Counter):
    """Places among those that take part, used as places in the batch."""

    def prepare(self, rows):
        return super().prepare([row for row in rows if self.wants(row.params)])


class NeedsItsParameter(Counter):
    """Takes any other parameter beside the one that it needs."""

    def wants(self, params):
        if "counter" in params.extra and "every" not in params.extra["counter"]:
            raise InvalidRequest("every is missing", param="custom_params.counter.every")
        return "counter" in params.extra


def said(row):
    return np.concatenate([row.output_ids, np.array(row.ahead_ids, np.int64)])


class DraftCounter(Counter):
    """It counts drafts, too, and forgets them."""

    def due(self, row):
        super().due(row)
        count = row.memo[self][1] + [*row.ahead_ids].count(97)
        return count % row.params.extra["counter"].get("every", 2) == 0


class IgnoresDrafts(Penalties):
    def prepare(self, rows):
        return super().prepare([replace(row, ahead_ids=()) for row in rows])


class TakesDraftsForOutput(Penalties):
    """What comes of it shows where a request goes on by one of several paths."""

    def prepare(self, rows):
        return super().prepare([replace(row, output_ids=said(row), ahead_ids=()) for row in rows])


class RemembersDrafts(DraftCounter):
    def due(self, row):
        return Counter.due(self, replace(row, output_ids=said(row)))


class KnowsALengthAlready(DraftCounter):
    """What was worked out is kept by how many tokens there were, drafts included."""

    def due(self, row):
        kept = row.memo.setdefault(self, {})
        every = row.params.extra["counter"].get("every", 2)
        return kept.setdefault(row.generated, int((said(row) == 97).sum())) % every == 0


class OneAnswerPerRequest(DraftCounter):
    """All rows of a request get what its first one gets."""

    def prepare(self, rows):
        first: dict[int, object] = {}
        for row in rows:
            first.setdefault(id(row.memo), row.ahead_ids)
        return super().prepare([replace(row, ahead_ids=first[id(row.memo)]) for row in rows])


class CountsOutputAlone(MinNewTokens):
    def prepare(self, rows):
        return super().prepare([replace(row, ahead_ids=()) for row in rows])


def mutant(factory: type, caught_by: str) -> Mutant:
    suites = {Penalties: PenaltySuite, LogitBias: BiasSuite, MinNewTokens: MinimumSuite, Counter: CounterSuite}
    suites[DraftCounter] = CounterSuite
    base = factory.__mro__[1]
    own: dict[type, frozenset[str]] = {
        Counter: frozenset({"params"}),
        DraftCounter: frozenset({"params", "tokens_ahead"}),
    }
    provides = own.get(base)
    return Mutant(factory, suite=suites[base], caught_by=caught_by, provides=provides)  # type: ignore[index]


MUTANTS = [
    mutant(WantsEverybody, "test_a_request_that_asks_for_nothing_takes_no_part"),
    mutant(WantsNobody, "test_a_request_that_asks_takes_part"),
    mutant(DoesNothing, "test_whoever_takes_part_is_changed_at_some_step"),
    mutant(ChangesEveryRow, "test_bystanders_keep_their_logits"),
    mutant(BiasOfTheFirstBatch, "test_a_row_depends_on_its_own_request_alone"),
    mutant(CountsWhatItHasPrepared, "test_a_row_depends_on_its_own_request_alone"),
    mutant(RemembersInPlaces, "test_a_row_depends_on_its_own_request_alone"),
    mutant(CountsWhatItHasPrepared, "test_a_long_decode"),
    mutant(CountsRepeats, "test_a_step_may_be_repeated"),
    mutant(SharesItsMemory, "test_two_engines_do_not_meet"),
    mutant(KeepsTheViews, "test_a_long_decode"),
    mutant(AppliesTheLastStep, "test_a_long_decode"),
    mutant(CountsKnownTokensOnly, "test_tokens_that_are_not_known_yet"),
    mutant(TakesHashesForTokens, "test_hashes_of_media_are_no_tokens"),
    mutant(SubtractsTheMaximum, "test_forbidden_tokens_cause_no_numbers_that_are_none"),
    mutant(NeedsARow, "test_the_batch_may_be_empty"),
    mutant(WritesToTheRows, "test_the_rows_are_not_written"),
    mutant(TakesAnyParameter, "test_parameters_that_it_does_not_know_are_refused"),
    mutant(NamesNoParameter, "test_parameters_that_it_does_not_know_are_refused"),
    mutant(NeedsItsParameter, "test_parameters_that_it_does_not_know_are_refused"),
    mutant(ForbidsEverything, "test_a_long_decode"),
    mutant(ForbidsEverything, "test_whoever_takes_part_is_changed_at_some_step"),
    mutant(RulesOutBesideAGrammar, "test_beside_a_grammar_nothing_is_ruled_out"),
    mutant(CountsItsCalls, "test_a_step_may_be_repeated"),
    mutant(CountsItsCalls, "test_a_long_decode"),
    mutant(MixesUpTheRows, "test_a_row_depends_on_its_own_request_alone"),
    mutant(CountsRowsThatTakePart, "test_a_row_depends_on_its_own_request_alone"),
    mutant(CountsRowsThatTakePart, "test_bystanders_keep_their_logits"),
    mutant(TakesAnyParameter, "test_values_that_make_no_sense_are_taken_or_refused"),
    mutant(ReadsWhatIsMeantForOthers, "test_parameters_of_others_are_none_of_its_business"),
    mutant(IgnoresDrafts, "test_drafts_count_for_their_row_alone"),
    mutant(TakesDraftsForOutput, "test_drafts_count_for_their_row_alone"),
    mutant(RemembersDrafts, "test_drafts_count_for_their_row_alone"),
    mutant(RemembersDrafts, "test_rejected_drafts_leave_nothing_behind"),
    mutant(KnowsALengthAlready, "test_rejected_drafts_leave_nothing_behind"),
    mutant(OneAnswerPerRequest, "test_drafts_count_for_their_row_alone"),
    mutant(CountsOutputAlone, "test_drafts_count_for_their_row_alone"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: f"{one}-{one.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
