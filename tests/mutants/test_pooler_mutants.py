"""Broken poolers, and the tests of the suite that notice."""

from __future__ import annotations

import pytest

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.plugins.pooler_basic.poolers import ClsPooler, LastPooler, MeanPooler
from pegboard.plugins.row_outputs.suite import PoolerContract


class MeansTheMeans(MeanPooler):
    def reduce(self, hidden, spans):
        counts = [[span.count] for span in spans]
        return super().reduce(hidden, spans) / super().reduce(hidden, spans).new_tensor(counts)

    def combine(self, partials, length):
        return sum(partials) / len(partials)


class TakesTheLastOfEveryChunk(LastPooler):
    def rows(self, span):
        return range(span.count - 1, span.count)

    def combine(self, partials, length):
        return partials[0]


class TrustsTheCacheTooFar(MeanPooler):
    def first(self, length):
        return length - 1


class NeedsMoreThanThereIs(LastPooler):
    def first(self, length):
        return length


class ReadsBeyondTheSpan(ClsPooler):
    def rows(self, span):
        return range(span.count, span.count + 1) if span.start else range(1)


class ReadsWhatItDoesNotNeed(LastPooler):
    def rows(self, span):
        return range(span.count)

    def reduce(self, hidden, spans):
        ends = [sum(one.count for one in spans[: i + 1]) - 1 for i in range(len(spans))]
        return hidden[ends].float()


class AddsTheNeighbour(MeanPooler):
    def reduce(self, hidden, spans):
        return super().reduce(hidden, spans).cumsum(0)


class KeepsTheDtype(LastPooler):
    def reduce(self, hidden, spans):
        return hidden


class AnswersInDouble(MeanPooler):
    def combine(self, partials, length):
        return super().combine(partials, length).astype("float64")


class SaysTheSameOfAll(LastPooler):
    def combine(self, partials, length):
        return partials[0] * 0


CAUGHT = {
    MeansTheMeans: "test_chunks_do_not_matter",
    TakesTheLastOfEveryChunk: "test_chunks_do_not_matter",
    TrustsTheCacheTooFar: "test_cached_before_the_first_position_does_not_matter",
    NeedsMoreThanThereIs: "test_cached_before_the_first_position_does_not_matter",
    ReadsBeyondTheSpan: "test_rows_lie_in_the_span",
    ReadsWhatItDoesNotNeed: "test_rows_lie_in_the_span",
    AddsTheNeighbour: "test_other_prompts_of_the_batch_do_not_matter",
    KeepsTheDtype: "test_partial_results_are_float32",
    AnswersInDouble: "test_one_vector_in_float32",
    SaysTheSameOfAll: "test_it_reads_something",
}
MUTANTS = [Mutant(cls, suite=PoolerContract, caught_by=test) for cls, test in CAUGHT.items()]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
