"""Batches as differences: whatever the scheduler's history, the other end gets every batch back."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.core.interfaces.batch import ModelWorkerBatch, TableChanges
from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.forward import ForwardMode
from pegboard.core.interfaces.sampling import LogprobRequest
from pegboard.plugins.parallel.delta import Decoder, Encoder, changes_of, runs_of
from pegboard.plugins.parallel.messages import MAX_BYTES, Frames, LinkError, Step, encode, to_follower
from pegboard.plugins.parallel.part import NAME, Stamp
from pegboard.plugins.row_outputs.messages import NAME as ROWS
from pegboard.plugins.row_outputs.messages import Rows
from pegboard.toolkit.model.ranks import PENDING
from tests.core.pipeline.harness import FakeModel, Harness, prompts

DERIVED = {"sampling", "sampled_rows", "payloads", "extras", "table", "input_ids", "trees"}
"""What followers do not get, or what is compared apart."""


class Sending(FakeModel):
    """Sends every batch to another end as well, which must get it back."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        rows, width = self.table.shape
        self.encoder, self.decoder = Encoder(rows, width), Decoder(rows, width, {ROWS: Rows})
        self.mirror = np.zeros_like(self.table)
        self.sent = 0

    def __call__(self, work: ModelWorkerBatch) -> BatchResult:
        self.sent += 1
        stamp = Stamp(self.sent, work.sampling is not None)
        message = to_follower.decode(encode(Step(self.encoder.batch(work, stamp))))
        assert isinstance(message, Step)
        found = self.decoder.batch(message.fields)
        same(found, work)
        if found.table is not None:
            self.mirror.reshape(-1)[found.table.places] = found.table.slots
        answer = super().__call__(work)
        for row, length in zip(work.rows.tolist(), work.seq_lens.tolist(), strict=True):
            assert np.array_equal(self.mirror[row, :length], self.table[row, :length])
        return answer


def same(found: ModelWorkerBatch, work: ModelWorkerBatch) -> None:
    for field in fields(ModelWorkerBatch):
        if field.name not in DERIVED:
            ours, theirs = getattr(found, field.name), getattr(work, field.name)
            equal = np.array_equal(ours, theirs) if isinstance(theirs, np.ndarray) else ours == theirs
            assert equal, f"{field.name}: {ours}, not {theirs}"
    known = np.ones(work.input_ids.shape, bool)
    if work.future_indices is not None:
        known[work.future_indices] = False
    assert np.array_equal(found.input_ids[known], work.input_ids[known])
    assert found.extras.pop(PENDING, False) == (work.future_indices is not None)
    assert found.extras.keys() == work.extras.keys()
    assert found.payloads[NAME] == Stamp(0, work.sampling is not None)
    assert found.payloads.keys() - {NAME} == work.payloads.keys()
    for name, payload in work.payloads.items():
        assert repr(found.payloads[name]) == repr(payload)


@settings(max_examples=20, deadline=None)
@given(
    cache=st.sampled_from(["radix", "block", "none"]),
    page_size=st.sampled_from([1, 4]),
    chunk=st.sampled_from([None, 8, 32]),
    mixed=st.booleans(),
    tokens=st.sampled_from([128, 192, 2048]),
    seed=st.integers(0, 10_000),
    loop=st.sampled_from(["normal", "overlap"]),
    bad_luck=st.sampled_from([0.0, 0.2]),
)
def test_every_batch_comes_back(**drawn: Any) -> None:
    history(**drawn)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(200))
def test_every_batch_of_many_histories_comes_back(seed: int) -> None:
    draw = random.Random(seed)
    history(
        draw.choice(["radix", "block", "none"]), draw.choice([1, 4]), draw.choice([None, 8, 32]), draw.random() < 0.5,
        draw.choice([128, 192, 2048]), seed, draw.choice(["normal", "overlap"]), draw.choice([0.0, 0.2]),
    )  # fmt: skip


def history(
    cache: str, page_size: int, chunk: int | None, mixed: bool, tokens: int, seed: int, loop: str, bad_luck: float
) -> None:
    """Random arrivals, aborts, retractions and failing forward passes."""
    draw, luck = random.Random(seed), random.Random(seed + 1)
    harness = Harness(
        cache=cache, page_size=page_size, chunk=chunk, mixed_chunk=mixed, tokens=tokens, policy="lpm", loop=loop,
        model=Sending,
    )  # fmt: skip
    harness.rows.mirrored = True  # as it is where batches run in several places
    harness.model.fail_on = lambda work: len(work.rows) > 1 and luck.random() < bad_luck
    try:
        for number, prompt in enumerate(prompts(12, seed=seed, longest=40)):
            start = 0 if number % 4 == 0 else None
            harness.submit(f"r{number}", prompt, draw.randrange(1, 24), logprob_start=start)
            for _ in range(draw.randrange(4)):
                harness.step()
        harness.run()
    finally:
        harness.scheduler.components.executor.close()
    assert isinstance(harness.model, Sending)
    assert harness.model.sent == len(harness.model.batches) > 0


@pytest.mark.parametrize("count", [0, 1, 5, 200])
def test_changes_of_the_table_come_back(count: int) -> None:
    draw = np.random.default_rng(count)
    places = np.cumsum(draw.integers(1, 3, count)).astype(np.int64)
    table = TableChanges(places, np.cumsum(draw.integers(-1, 2, count)).astype(np.int32) + 300)
    found = changes_of(runs_of(table))
    assert np.array_equal(found.places, table.places)
    assert np.array_equal(found.slots, table.slots)


def decode_step(rows: int, prefix: int, tokens: int = 7) -> ModelWorkerBatch:
    lengths = np.full(rows, prefix, np.int64)
    numbers = np.arange(rows, dtype=np.int64)
    return ModelWorkerBatch(
        bid=1, forward_mode=ForwardMode.DECODE, input_ids=numbers * 0 + tokens, positions=lengths, rows=numbers + 1,
        seq_lens=lengths + 1, extend_lens=numbers * 0 + 1, prefix_lens=lengths, out_cache_loc=numbers + 40,
        logits_indices=None, sampling=None, sampled_rows=numbers[:0],
    )  # fmt: skip


def test_what_cannot_be_sent_is_an_error() -> None:
    encoder = Encoder(5, 64)
    for name, value in {"positions": np.zeros((3, 4), np.int64), "tail_bits": np.zeros(4, np.int64)}.items():
        work = decode_step(4, 10)
        setattr(work, name, value)
        with pytest.raises(ValueError, match="not sent to other ranks"):
            encoder.batch(work, Stamp(1, True))
    work = decode_step(4, 10)
    work.payloads["acme"] = object()
    with pytest.raises(TypeError, match="cannot be sent to other ranks"):
        encoder.batch(work, Stamp(1, True))


def test_a_payload_comes_back_in_its_type() -> None:
    encoder, decoder = Encoder(5, 64), Decoder(5, 64, {ROWS: Rows})
    work, some = decode_step(4, 10), np.arange(3)
    work.payloads[ROWS] = Rows(some, some + 1, ((3, LogprobRequest(2, (5,))),), some[:0], (), some[:0])
    work.extras["acme.scale"] = np.array([[0.5], [2.0]], np.float32)
    work.extras["acme.name"] = "x"
    found = decoder.batch(encoder.batch(work, Stamp(1, True)))
    rows = found.payloads[ROWS]
    assert isinstance(rows, Rows)
    assert rows.logprob_rows.tolist() == [0, 1, 2]
    assert rows.logprob_requests == ((3, LogprobRequest(2, (5,))),)
    assert found.extras["acme.scale"].tolist() == [[0.5], [2.0]]
    assert found.extras["acme.name"] == "x"


def test_noise_is_no_message() -> None:
    draw = np.random.default_rng(0)
    for size in (1, 5, 40):
        with pytest.raises((msgspec.DecodeError, msgspec.ValidationError)):
            to_follower.decode(draw.bytes(size))
    with pytest.raises(LinkError, match="more than"):
        list(Frames().add((MAX_BYTES + 1).to_bytes(4, "little")))
    assert list(Frames().add(b"\2\0\0\0ab\1\0")) == [b"ab"]


def test_a_decode_step_takes_few_bytes() -> None:
    """The same requests once more: their tokens, and the slots in the table that they begin."""
    encoder = Encoder(257, 4096)
    encoder.batch(decode_step(256, 10), Stamp(1, True))
    short = len(encoder.batch(decode_step(256, 11), Stamp(2, True)))
    encoder.batch(decode_step(256, 4000), Stamp(3, True))
    long = len(encoder.batch(decode_step(256, 4001), Stamp(4, True)))
    assert short == long
    assert short < 256 * 8 + 100
