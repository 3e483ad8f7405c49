"""The conformance suite of LogitsProcessor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pegboard.conformance.fake_client import FakeTokenizer
from pegboard.conformance.properties import properties
from pegboard.conformance.suite import ContractSuite, capability
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.logits_processor import LogitsProcessor, LogitsProcessorContext
from pegboard.core.interfaces.sampling import Grammar, SamplingParams, SamplingRow

VOCAB = 160
"""Tokens of the suite's model: one per character of ASCII, and some that are no text."""

EOS = frozenset({2, 3})

PLAIN = SamplingParams(max_new_tokens=20, temperature=0.7, top_k=5, seed=3)
"""A request that asks for nothing that changes logits."""


class Life:
    """A request of a known future: what it will generate, and how far it is."""

    def __init__(self, params: SamplingParams, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.params = params
        # Few different tokens, among them "a", "b" and a space: what counts repetitions has something to count.
        self.prompt = rng.choice([32, 97, 98, 99, 100], rng.integers(1, 12)).astype(np.int64)
        self.future = rng.choice([32, 97, 98, 99, 5], 64).astype(np.int64)
        self.generated = 0
        self.memo: dict[object, Any] = {}

    def row(self, *, fresh: bool = False, pending: int = 0, drafts: Sequence[int] = ()) -> SamplingRow:
        """Return the request as it stands; `fresh` as code sees it that has never seen it before."""
        known = self.future[: self.generated - pending].copy()
        drafted = np.array(drafts, np.int64) if len(drafts) else ()
        return SamplingRow(self.params, self.prompt.copy(), known, pending, {} if fresh else self.memo, drafted)

    def said(self, drafts: Sequence[int]) -> SamplingRow:
        """Return the request, never seen before, as it were had it said what is drafted."""
        said = np.concatenate([self.future[: self.generated], np.array(drafts, np.int64)])
        return SamplingRow(self.params, self.prompt.copy(), said)


def logits_of(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


class LogitsProcessorContract(ContractSuite):
    """What every logits processor owes the batch: a row depends on its own request alone, however it got here."""

    contract = "logits_processor"

    def asking(self) -> Sequence[SamplingParams]:
        """Parameters of requests that take part, as different as they can be. Override this; by default requests name
        the provider, without parameters.
        """
        return [SamplingParams(extra={self.subject.own_name: {}})]

    # What the tests share.

    @pytest.fixture
    def processor(self) -> LogitsProcessor:
        return self.new()

    def new(self, vocab: int = VOCAB) -> LogitsProcessor:
        ctx = LogitsProcessorContext(vocab, torch.device("cpu"), EOS, FakeTokenizer())
        made: LogitsProcessor = self.build(ctx)
        return made

    def lives(self, processor: LogitsProcessor) -> list[Life]:
        """Return requests that take part, and bystanders in between. Skips where the suite is not told what takes
        part.
        """
        asking = list(self.asking())
        for params in asking:
            refused, takes_part = _ask(processor, params)
            if takes_part:
                continue
            why = f"it refuses {params.extra}: {refused}" if refused else "a request of `asking` takes no part"
            if type(self).asking is LogitsProcessorContract.asking:
                why = f"; {why}" if refused else ""
                pytest.skip(f"override asking: the suite cannot know what requests this processor takes part in{why}")
            pytest.fail(why)
        lives = [Life(PLAIN, 0)]
        for seed, params in enumerate(asking * 2):
            lives.append(Life(params, seed + 1))
        return [*lives, Life(PLAIN, 99)]

    def change(
        self, processor: LogitsProcessor, rows: Sequence[SamplingRow], logits: torch.Tensor, *, gone: bool = True
    ) -> torch.Tensor:
        """Return the changed logits of one step. With `gone`, what `prepare` was given is no more by the time of
        `apply`.
        """
        changed = logits.clone()
        state = processor.prepare(rows)
        for row in rows if gone else ():
            row.prompt_ids[:] = 0
            row.output_ids[:] = 0
            if len(row.ahead_ids):
                np.asarray(row.ahead_ids)[:] = -1
        if state is not None:
            assert processor.apply(changed, state) is None, "apply works in place and returns nothing"
        assert changed.dtype == torch.float32
        assert not changed.isnan().any(), "NaN among the logits"
        assert not (changed == math.inf).any(), "an infinite logit"
        dead = (logits.isfinite().all(-1) & ~changed.isfinite().any(-1)).nonzero().flatten().tolist()
        assert not dead, (
            f"rows {dead} are left without a finite logit: no token can be drawn, and the request fails. Leave one, or "
            "give tokens that may be taken where nothing else is left LAST_RESORT "
            "(pegboard.toolkit.sampling.logit_pairs)"
        )
        return changed

    def same(self, row: torch.Tensor, alone: torch.Tensor, mistake: str) -> None:
        __tracebackhide__ = True
        torch.testing.assert_close(row, alone, rtol=1e-6, atol=1e-6, msg=lambda text: f"{mistake}.\n{text}")

    def alone(self, life: Life, logits: torch.Tensor, pending: int = 0) -> torch.Tensor:
        """Return what a new processor makes of the one row of a request that it has never seen."""
        return self.change(self.new(), [life.row(fresh=True, pending=pending)], logits[None], gone=False)[0]

    # Taking part.

    def test_a_request_that_asks_for_nothing_takes_no_part(self, processor: LogitsProcessor) -> None:
        assert processor.wants(PLAIN) is False
        assert processor.wants(SamplingParams()) is False
        assert processor.prepare([Life(PLAIN, seed).row() for seed in range(3)]) is None

    def test_a_request_that_asks_takes_part(self, processor: LogitsProcessor) -> None:
        lives = self.lives(processor)
        assert all(processor.wants(life.params) is (life.params is not PLAIN) for life in lives)

    def test_whoever_takes_part_is_changed_at_some_step(self, processor: LogitsProcessor) -> None:
        for life in self.lives(processor)[1:-1]:
            changes = False
            for life.generated in range(0, 60, 5):
                logits = logits_of(1, life.generated)
                changes |= not torch.equal(self.change(processor, [life.row()], logits), logits)
            assert changes, f"nothing ever changes for {life.params}"

    def test_bystanders_keep_their_logits(self, processor: LogitsProcessor) -> None:
        lives = self.lives(processor)
        for step in range(12):
            logits = logits_of(len(lives), step)
            changed = self.change(processor, [life.row() for life in lives], logits)
            for place, life in enumerate(lives):
                if life.params is PLAIN:
                    assert torch.equal(changed[place], logits[place]), "a request that takes no part is changed"
                life.generated += 1

    # Steps.

    @properties(max_examples=40)
    @given(data=st.data())
    def test_a_row_depends_on_its_own_request_alone(self, data: st.DataObject) -> None:
        """Requests join and leave, go on or stand still, in any order: each row is as if it were alone and new."""
        processor = self.new()
        lives = self.lives(processor)
        for step in range(data.draw(st.integers(1, 8))):
            order = data.draw(st.permutations(range(len(lives))))
            some = [lives[place] for place in order[: data.draw(st.integers(1, len(lives)))]]
            for life in some:
                life.generated += data.draw(st.integers(0, 3))
            logits = logits_of(len(some), step)
            changed = self.change(processor, [life.row() for life in some], logits)
            for place, life in enumerate(some):
                self.same(changed[place], self.alone(life, logits[place]), f"row {place} of {len(some)}: {_MIXED_UP}")

    def test_a_long_decode(self, processor: LogitsProcessor) -> None:
        """The usual case: the same requests step by step, one token each."""
        lives = self.lives(processor)
        for step in range(40):
            logits = logits_of(len(lives), step)
            changed = self.change(processor, [life.row() for life in lives], logits)
            for place, life in enumerate(lives):
                self.same(changed[place], self.alone(life, logits[place]), f"step {step}, row {place}: {_MIXED_UP}")
                life.generated += 1

    def test_a_step_may_be_repeated(self, processor: LogitsProcessor) -> None:
        """A batch that failed is run again, in halves."""
        lives = self.lives(processor)
        for step in range(5, 20):
            for life in lives:
                life.generated = step
            logits = logits_of(len(lives), step)
            whole = self.change(processor, [life.row() for life in lives], logits)
            for place, life in enumerate(lives):
                again = self.change(processor, [life.row()], logits[place : place + 1])
                self.same(again[0], whole[place], f"step {step}, row {place}, repeated: count by {_COUNT}")

    def test_two_engines_do_not_meet(self, processor: LogitsProcessor) -> None:
        """Two instances keep what they remember of a request apart."""
        other = self.new()
        for life in self.lives(processor):
            for life.generated in (3, 4, 9):
                logits = logits_of(1, life.generated)
                first, second = (self.change(one, [life.row()], logits) for one in (processor, other))
                self.same(first, second, f"two instances find each other's notes: keep them in memo under {_KEY}")

    def test_tokens_that_are_not_known_yet(self, processor: LogitsProcessor) -> None:
        """One that does not read the output gives the same where the newest token is still on its way; its count is
        all that matters.
        """
        if processor.reads_output:
            pytest.skip("it reads the output, so the loop waits for every token")
        for life in self.lives(processor):
            for life.generated in range(1, 20):
                logits = logits_of(1, life.generated)[0]
                known, late = self.alone(life, logits), self.alone(life, logits, pending=1)
                self.same(late, known, "it needs a token that is still on its way: count with SamplingRow.generated")
                life.future = np.roll(life.future, 1)
                self.same(self.alone(life, logits), known, "it reads the output: reads_output must stay True")

    # Edges.

    def test_hashes_of_media_are_no_tokens(self, processor: LogitsProcessor) -> None:
        """Prompts may hold numbers far beyond the vocabulary; they have no logit."""
        for life in self.lives(processor):
            life.prompt = np.array([97, 10**15, 98, VOCAB, 97], dtype=np.int64)
            for life.generated in (0, 5):
                self.alone(life, logits_of(1)[0])

    def test_forbidden_tokens_cause_no_numbers_that_are_none(self, processor: LogitsProcessor) -> None:
        """A processor before it may have left minus infinity, in any place."""
        for life in self.lives(processor):
            for life.generated in (0, 1, 6):
                logits = torch.full((VOCAB,), -math.inf)
                logits[50] = 1.0
                self.alone(life, logits)

    def test_beside_a_grammar_nothing_is_ruled_out(self, processor: LogitsProcessor) -> None:
        """A grammar may allow nothing but just what a processor forbids, and a row with no finite logit fails: for
        requests with a grammar a forbidden token gets LAST_RESORT, and not minus infinity.
        """
        self.lives(processor)
        for seed, params in enumerate(self.asking()):
            life = Life(msgspec.structs.replace(params, grammar=Grammar("regex", "a*")), seed)
            if not _ask(processor, life.params)[1]:
                continue
            for life.generated in range(0, 60, 3):
                changed = self.alone(life, logits_of(1, life.generated)[0])
                ruled_out = (~changed.isfinite()).nonzero().flatten().tolist()
                assert not ruled_out, (
                    f"tokens {ruled_out[:8]} of a request with a grammar get minus infinity: give them LAST_RESORT "
                    f"(pegboard.toolkit.sampling.logit_pairs), the grammar may allow nothing else. {life.params}"
                )

    def test_the_batch_may_be_empty(self, processor: LogitsProcessor) -> None:
        state = processor.prepare([])
        if state is not None:
            processor.apply(torch.empty(0, VOCAB), state)

    def test_the_rows_are_not_written(self, processor: LogitsProcessor) -> None:
        lives = self.lives(processor)
        for life in lives:
            life.generated = 8
        rows = [life.row() for life in lives]
        before: list[NDArray[np.int64]] = []
        for row in rows:
            before += [row.prompt_ids.copy(), row.output_ids.copy()]
            row.prompt_ids.setflags(write=False)
            row.output_ids.setflags(write=False)
        processor.prepare(rows)
        after = [ids for row in rows for ids in (row.prompt_ids, row.output_ids)]
        assert all(map(np.array_equal, before, after))

    # Drafts.

    @capability("tokens_ahead")
    @properties(max_examples=12)
    @given(data=st.data())
    def test_drafts_count_for_their_row_alone(self, data: st.DataObject) -> None:
        """Each step has a tree of drafts for each request, whose rows come in any order, and requests go on with other
        tokens than were drafted: a row is as if the drafts before it had been said, and others had never been.
        """
        processor = self.new()
        lives = self.lives(processor)
        for step in range(data.draw(st.integers(2, 6))):
            rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
            some = [life for life in lives if rng.random() < 0.8]
            nodes = [(life, path) for life in some for path in _paths(rng, life)]
            nodes = [nodes[place] for place in rng.permutation(len(nodes))]
            logits = logits_of(len(nodes), step)
            rows = [life.row(drafts=path) for life, path in nodes]
            changed = self.change(processor, rows, logits)
            for place, (life, path) in enumerate(nodes):
                expected = self.change(self.new(), [life.said(path)], logits[place : place + 1], gone=False)
                self.same(changed[place], expected[0], f"output of {life.generated} and drafts {path}: {_DRAFTED}")
            for life in lives:
                life.generated += int(rng.integers(0, 4))

    @capability("tokens_ahead")
    def test_rejected_drafts_leave_nothing_behind(self, processor: LogitsProcessor) -> None:
        """A chain of drafts at each step, and none of them is right."""
        for life in self.lives(processor):
            for life.generated in range(30):
                logits = logits_of(5, life.generated)
                right, said = life.future[life.generated :][:4], np.unique(life.future)
                wrong = said[(np.searchsorted(said, right) + 1) % len(said)].tolist()
                self.change(processor, [life.row(drafts=wrong[:depth]) for depth in range(5)], logits)
                after = self.change(processor, [life.row()], logits[:1])
                self.same(after[0], self.alone(life, logits[0]), f"after {life.generated} tokens: {_REMEMBERED}")

    # Parameters of its own.

    @capability("params")
    @pytest.mark.parametrize("said", [{"no_such_parameter": 1}, {"": None}, {"0": [{"a": "b"}]}], ids=str)
    def test_parameters_that_it_does_not_know_are_refused(self, processor: LogitsProcessor, said: Any) -> None:
        """Beside what it needs, too."""
        name = self.own_name()
        for params in (SamplingParams(), *(one for one in self.asking() if _ask(processor, one)[1])):
            given = {**params.extra.get(name, {}), **said}
            refused, _ = _ask(processor, msgspec.structs.replace(params, extra={name: given}))
            assert refused is not None, (
                f"custom_params.{name} = {given} is taken: refuse parameters that it does not know"
            )
            assert refused.status == 400
            assert (refused.param or "").startswith(f"custom_params.{name}"), f"the error names {refused.param!r}"

    @capability("params")
    @pytest.mark.parametrize("wrong", [math.nan, math.inf, -(10**30), "\x00", [[[]]], {"a": {}}, True], ids=str)
    def test_values_that_make_no_sense_are_taken_or_refused(self, processor: LogitsProcessor, wrong: Any) -> None:
        """Each parameter of `asking` with something else in its place: InvalidRequest, or a step that works."""
        name = self.own_name()
        for life in self.lives(processor)[1:-1]:
            for parameter in life.params.extra[name]:
                said = {**life.params.extra[name], parameter: wrong}
                params = msgspec.structs.replace(life.params, extra={name: said})
                refused, takes_part = _ask(processor, params)
                if refused is not None:
                    assert (refused.param or "").startswith(f"custom_params.{name}"), f"{parameter}: {refused.param}"
                odd = Life(params, 5)
                for odd.generated in (0, 9) if takes_part else ():
                    self.alone(odd, logits_of(1)[0])

    @capability("params")
    def test_parameters_of_others_are_none_of_its_business(self, processor: LogitsProcessor) -> None:
        assert processor.wants(SamplingParams(extra={"somebody_else": {"strength": 2}})) is False

    def own_name(self) -> str:
        """Return the name by which requests ask for it: that of `asking`, since a class under test may have none."""
        names = {name for params in self.asking() for name in params.extra}
        assert len(names) == 1, f"requests of a processor with parameters name it: {sorted(names)}"
        return names.pop()


_MIXED_UP = (
    "it depends on more than its own request. Keep state by row, in SamplingRow.memo, never by place in the batch or "
    "by call; use the same row's numbers for its logits"
)
_DRAFTED = (
    "SamplingRow.ahead_ids are output of their row, behind output_ids. Read them (toolkit.sampling.ahead), for each "
    "row anew, and keep nothing of them in memo, which the request's other rows share"
)
_REMEMBERED = "drafts that came to nothing are remembered. Keep in memo what output_ids say, and nothing of ahead_ids"
_COUNT = "the row's tokens, not by calls"
_KEY = "the processor itself as the key"


def _ask(processor: LogitsProcessor, params: SamplingParams) -> tuple[InvalidRequest | None, bool]:
    try:
        return None, processor.wants(params)
    except InvalidRequest as error:
        return error, False


def _paths(rng: np.random.Generator, life: Life) -> list[list[int]]:
    """Return the drafts before each node of a tree, the root first: at times right, and otherwise any."""
    paths: list[list[int]] = [[]]
    for _ in range(int(rng.integers(0, 6))):
        path = paths[int(rng.integers(0, len(paths)))]
        right = life.future[life.generated + len(path)]
        paths.append([*path, int(right if rng.random() < 0.5 else rng.choice([32, 97, 98, 5, 120]))])
    return paths
