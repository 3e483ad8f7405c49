"""A scheduler around a fake model that keeps nothing but a state: the next token of a request is that of the state
which its step was told to read, so a wrong slot changes the answer. `oracle` computes the same from the tokens alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pegboard.core.interfaces.batch import ModelWorkerBatch
from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.layers import ModelSpec
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.stage import Stage
from pegboard.core.interfaces.trees import TokenTrees
from pegboard.core.pipeline.executor import Done
from pegboard.plugins.recurrent_states.messages import NAME, StateWork
from pegboard.plugins.recurrent_states.slots import StateSlots
from pegboard.plugins.recurrent_states.stage import States
from pegboard.plugins.speculation.api import DraftRow, Speculator, SpeculatorContext
from pegboard.toolkit.cache.req_to_token import ReqToTokenPool
from pegboard.toolkit.sampling import tree
from tests.core.pipeline.harness import EOS, VOCAB, FakeModel, Harness

PRIME = 1_000_003
GARBAGE = -7


def behind(state: int, tokens: Sequence[int]) -> int:
    """The state behind some more tokens."""
    for token in tokens:
        state = (state * 31 + token + 1) % PRIME
    return state


def oracle(prompt: Sequence[int], n: int, *, ignore_eos: bool = False) -> list[int]:
    """What a request alone in the world would get."""
    state, out = behind(0, prompt), list[int]()
    while len(out) < n:
        out.append(state % VOCAB)
        if out[-1] == EOS and not ignore_eos:
            break
        state = behind(state, out[-1:])
    return out


class StateModel(FakeModel):
    """Keeps a state per slot, and KV as the other one does, which tells a wrong page."""

    def __init__(self, rows: ReqToTokenPool, num_slots: int) -> None:
        super().__init__(rows, num_slots)
        self.states = np.full(StateHarness.count + 1, GARBAGE, np.int64)
        self.stage_parts = {NAME: lambda work: Done(StateHarness.count)}
        self.late: Any = lambda work: False
        """Whether a pass that has run fails all the same."""
        self.runs: list[int] = []
        self.verified = 0
        """Tokens ahead that were computed."""

    def answer(self, work: ModelWorkerBatch) -> BatchResult:
        ids = work.input_ids.copy()
        if work.future_indices is not None:
            ids[work.future_indices] = self.last[work.rows[work.future_indices + len(work.rows) - len(ids)]]
        self.slots[work.out_cache_loc] = ids
        payload = work.payloads[NAME]
        assert isinstance(payload, StateWork)
        ends = self._run(payload, ids)
        if work.trees is not None:
            return self._verified(work.trees, [ends[packed] % VOCAB for packed in work.logits_indices.tolist()], work)
        sampled = range(len(ids)) if work.logits_indices is None else work.logits_indices.tolist()
        tokens = np.array([ends[packed] % VOCAB for packed in sampled], np.int64)
        self.last[work.sampled_rows] = tokens
        if self.late(work):
            raise RuntimeError("out of luck, late")
        return BatchResult(tokens)

    def _verified(self, trees: TokenTrees, drawn: list[int], work: ModelWorkerBatch) -> BatchResult:
        """What stands of tokens ahead; `drawn` is the token behind each node."""
        self.verified += len(drawn) - len(trees)
        accepted = tree.walk(trees, np.array(drawn, np.int64))
        if self.late(work):
            raise RuntimeError("out of luck, late")
        return BatchResult(accepted.tokens, accepted=accepted)

    def _run(self, payload: StateWork, ids: NDArray[np.int64]) -> dict[int, int]:
        """Run all rounds; the state behind the last packed token of each run."""
        before = {int(one) for part in payload.rounds[:1] for one in part.sources[~part.fresh]}
        written, ends, seen = set[int](), dict[int, int](), 0
        for part in payload.rounds:
            self.runs.append(len(part.firsts))
            sources = [0 if fresh else int(self.states[at]) for at, fresh in zip(part.sources, part.fresh, strict=True)]
            assert GARBAGE not in sources, "a state is read that nobody wrote"
            for first, length, source, target in zip(part.firsts, part.lengths, sources, part.targets, strict=True):
                assert target > 0, "a state is written to nobody's slot"
                assert int(target) not in before | written, "a slot is written to twice, or read as well"
                written.add(int(target))
                self.states[target] = behind(source, ids[first : first + length].tolist())
                ends[int(first + length - 1)] = int(self.states[target])
                seen += int(length)
        assert seen == len(ids), "some tokens are in no run"
        return ends

    def spoil(self, work: ModelWorkerBatch) -> None:
        """What a pass that failed leaves behind is undefined."""
        payload = work.payloads.get(NAME)
        if isinstance(payload, StateWork):
            for part in payload.rounds:
                self.states[part.targets] = GARBAGE


class Foresight(Speculator[NoOptions]):
    """Drafts chains, most of whose tokens are right, at this rate."""

    def __init__(self, rate: float) -> None:
        super().__init__(NoOptions(), SpeculatorContext(ModelSpec("", VOCAB, 8, 4096, (), ()), 8))
        self.max_nodes, self.rate = 8, rate

    def propose(self, rows: Sequence[DraftRow]) -> TokenTrees:
        return tree.chains((int(row.tokens[-1]), self._draft(row)) for row in rows)

    def _draft(self, row: DraftRow) -> list[int]:
        tokens = row.tokens.tolist()
        rng = random.Random(f"{len(tokens)} {tokens[-1]}")
        for token in oracle(tokens, rng.randrange(row.most)):
            tokens.append(token if rng.random() < self.rate else rng.randrange(VOCAB))
        return tokens[row.tokens.shape[0] :]


class StateHarness(Harness):
    """With so many slots in `count`, which the model is built with."""

    count = 12

    def __init__(
        self, *, count: int = 12, every: int = 8, ahead: int = 7, joining: Sequence[Stage] = (), **more: Any
    ) -> None:
        StateHarness.count = count
        page_size = more.get("page_size", 1)
        each = 3 if more.get("loop") == "overlap" else 2
        self.stage = States(lambda found: StateSlots(found, page_size, every, each, ahead))
        super().__init__(model=StateModel, joining=[self.stage, *joining], **more)
        assert isinstance(self.model, StateModel)
        self.states = self.model

    def step(self) -> Any:
        outputs = super().step()
        slots = self.stage.slots
        free = len(slots.free) + len(slots.snapshots) + slots.pending
        own = sum(len(use.own) for use in self._uses())
        assert free + own == slots.count, "slots are lost, or twice there"
        return outputs

    def _uses(self) -> Any:
        from pegboard.plugins.recurrent_states.slots import USE

        return [use for req in self.scheduler.requests.alive.values() if (use := USE.peek(req)) is not None]
