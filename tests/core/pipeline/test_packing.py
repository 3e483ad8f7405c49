"""What stages bring along with a batch: of each request or token its own, also for the halves of one that failed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pegboard.core.interfaces.batch import BatchExtras, ModelWorkerBatch
from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.messages import TokenizedRequest
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.stage import Column, Interest, Stage, StepView
from tests.core.pipeline.harness import FakeModel, Harness, Seer, oracle

LENGTH, TOKENS = 9, 5
SIZES = range(1, 7)
WAYS: dict[str, dict[str, Any]] = {
    "decodes apart": {},
    "decodes in prefills": {"mixed_chunk": True, "chunk": 16},
    "layer by layer": {"split_prefill_layers": 2},
    "drafts": {"drafts": "chain"},
    "draft trees": {"drafts": "tree", "mixed_chunk": True},
}
TOLD = {
    "the model raises": "is broken",
    "the stage raises": "no such adapter",
    "a long array": "'acme.row'",
}


def number_of(req: Req) -> float:
    """A column of the stage below."""
    return req.input_len + req.seed % 7


class Reader(FakeModel):
    """Reads what the stage below has brought, and finds each entry where the docs say it is."""

    numbers: dict[int, float]

    def __call__(self, work: ModelWorkerBatch) -> BatchResult:
        extras = work.extras
        self.numbers = vars(self).setdefault("numbers", {})
        assert extras["acme.batch"] == work.bid
        assert extras["acme.row"].tolist() == work.rows.tolist()
        assert extras["acme.token"][:, 0].tolist() == work.rows.repeat(work.extend_lens).tolist()
        # A node of a tree of drafts has the position of its depth; its entry is that of its place among the drafts.
        known = (work.input_ids >= 0) & (work.tail_bits is None or work.tail_bits == 0)
        assert extras["acme.token"][known, 1].tolist() == work.positions[known].tolist()
        assert extras["acme.share"].tolist() == extras["acme.number"].repeat(work.extend_lens).tolist()
        assert extras["acme.number"].dtype == np.int64
        assert extras["acme.share"].dtype == np.float32
        numbers = self.numbers
        for row, number, fresh in zip(
            work.rows.tolist(), extras["acme.number"].tolist(), work.prefix_lens, strict=True
        ):
            assert numbers.setdefault(row, number) == number or fresh == 0
            numbers[row] = number
        if extras["acme.poison"].any():
            raise RuntimeError("the adapter is broken")
        return super().__call__(work)


@dataclass
class Bringing(Stage):
    """Brings a request's row, and positions of its tokens. From `start` tokens on the request `bad` is poison: the
    model fails of it, or the stage does, or its array has an entry too many.
    """

    how: str
    start: int
    name = "acme"
    columns = (
        Column("number", number_of),
        Column("share", number_of, per="token", dtype=np.float32),
    )

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest:
        return Interest()

    def pack(self, step: StepView, extras: BatchExtras) -> None:
        batch = step.batch
        # Of a split prefill the whole is packed.
        assert step.sampled == [req for req in batch.reqs if req.rid not in batch.partial]
        is_bad = np.array([req.rid == "bad" for req in batch.reqs]) & (batch.seq_lens >= self.start)
        if is_bad.any() and self.how == "the stage raises":
            raise KeyError("no such adapter")
        rows = np.array([req.kv.row for req in batch.reqs])
        spans = zip(batch.prefix_lens.tolist(), batch.seq_lens.tolist(), strict=True)
        positions = np.concatenate([np.arange(start, stop) for start, stop in spans])
        extras.per_token("acme.token", np.stack([rows.repeat(batch.extend_lens), positions], axis=1))
        extras.per_request("acme.poison", is_bad & (self.how == "the model raises"))
        extras.per_request("acme.row", np.append(rows, 0) if is_bad.any() and self.how == "a long array" else rows)
        extras.whole("acme.batch", batch.bid)


@pytest.mark.parametrize("loop", ["normal", "overlap"])
@pytest.mark.parametrize(
    ("how", "way"),
    [
        *(("the model raises", way) for way in WAYS),
        *itertools.product(("the stage raises", "a long array"), ("layer by layer", "draft trees")),
    ],
)
def test_one_with_bad_extras_fails_alone(loop: str, way: str, how: str) -> None:
    drafted = 0
    for size in SIZES:
        start = LENGTH + size % 3  # in its prefill, or in one of its decodes
        more = dict(WAYS[way])
        shape = more.pop("drafts", None)
        speculator = None if shape is None else Seer(0.7, shape)
        stage = Bringing(how, start)
        harness = Harness(loop=loop, joining=[stage], model=Reader, speculator=speculator, **more)
        harness.submit("first", [9] * LENGTH, 3 * TOKENS, sampling={"ignore_eos": True})
        harness.step()  # so that decodes and prefills meet
        prompts = {f"r{i}": [i + 20] * LENGTH for i in range(size)}
        for place, (rid, prompt) in enumerate(prompts.items()):
            if place == size // 2:
                harness.submit("bad", [8] * LENGTH, TOKENS, sampling={"ignore_eos": True})
            harness.submit(rid, prompt, TOKENS, sampling={"ignore_eos": True})
        harness.run(limit=500)
        end = harness.finish("bad")
        assert (end["status"], harness.scheduler.counters.failed_batches) == (500, 1), (size, end)
        assert TOLD[how] in end["message"]
        assert harness.tokens("first") == oracle([9] * LENGTH, 3 * TOKENS, ignore_eos=True)
        for rid, prompt in prompts.items():
            assert harness.tokens(rid) == oracle(prompt, TOKENS, ignore_eos=True), (size, rid, harness.finish(rid))
        drafted += 0 if shape is None else harness.drafts.drafted_tokens
    assert (drafted > 0) is ("drafts" in WAYS[way]), "halves with drafts were to be tried as well"


WRONG: dict[str, tuple[Any, str]] = {
    "a list": ([1, 2], "expected a numpy array of numbers or bools, got list"),
    "a number": (np.int64(3), "expected a numpy array of numbers or bools, got int64"),
    "no dimension": (np.array(3), r"expected a numpy array of numbers or bools, got int64\[\]"),
    "objects": (np.array(["x", "y"]), r"expected a numpy array of numbers or bools, got <U1\[2\]"),
    "short": (np.zeros(1), "expected 2 entries, one for each request of batch.reqs, got 1"),
    "long": (np.zeros((5, 2)), "expected 2 entries, one for each request of batch.reqs, got 5"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_array_is_told_with_its_name(wrong: str) -> None:
    values, message = WRONG[wrong]
    extras = BatchExtras(2, 5)
    with pytest.raises((TypeError, ValueError), match=rf"extras 'acme\.x': {message}"):
        extras.per_request("acme.x", values)
    assert not extras.values


def test_one_name_is_taken_once() -> None:
    extras = BatchExtras(2, 5)
    extras.per_token("acme.x", np.zeros(5, np.float32))
    with pytest.raises(ValueError, match=r"'acme\.x': the name is taken"):
        extras.whole("acme.x", "again")


class Noting(Stage):
    name = "acme"

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest:
        return Interest()

    def pack(self, step: StepView, extras: BatchExtras) -> None:
        extras.whole("acme.note", step.number)


def test_extras_are_brought_anew_for_each_step_and_never_change_a_running_one() -> None:
    harness = Harness(joining=[Noting()])
    harness.submit("a", [1, 2], 3, sampling={"ignore_eos": True})
    harness.run()
    assert [work.extras for work in harness.model.batches] == [{"acme.note": 1}, {"acme.note": 2}, {"acme.note": 3}]
