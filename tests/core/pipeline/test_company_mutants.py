"""Broken parts of the core and of row outputs, each of which the game of test_company has to notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from pegboard.core.interfaces.req import SINGLE, KeyedTokens, Req
from pegboard.core.interfaces.status import FinishReason
from pegboard.core.pipeline import recovery
from pegboard.core.pipeline.batch import BatchBuilder
from pegboard.core.pipeline.components import Components
from pegboard.core.pipeline.finish import Constraints, EndTokens, StopText
from pegboard.core.pipeline.looking_ahead import TokensAhead
from pegboard.core.pipeline.memory import MemoryManager
from pegboard.core.pipeline.planner import Planner
from pegboard.core.pipeline.points import Points
from pegboard.core.pipeline.results import ResultProcessor
from pegboard.core.pipeline.services import Services
from pegboard.plugins.kv_tiers.api import NAME
from pegboard.plugins.media.encoder_cache import EncoderCache
from pegboard.plugins.media.encoding import Encoding
from pegboard.plugins.row_outputs import seeking, stage
from pegboard.plugins.row_outputs.stage import RowOutputs
from pegboard.toolkit.text.stop import StopMatcher
from pegboard_drills.gate import DrillGate
from tests.core.pipeline import test_company
from tests.core.pipeline.noticing import noticed
from tests.core.pipeline.test_company import play

Change = Callable[[pytest.MonkeyPatch], None]


# ---- memory of gates, and grammars -----------------------------------------------------------------------------------


def gives_memory_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is still written to."""
    forget = DrillGate.forget
    monkeypatch.setattr(DrillGate, "forget", lambda self, req: forget(self, req) and False)


def goes_on_with_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was retracted while its matcher worked comes back as if it ran."""

    def changed(self: Any, req: Any) -> None:
        del self.parked[req]
        self.running.join([req])

    monkeypatch.setattr(Planner, "resume", changed)


# ---- rows beside tokens ----------------------------------------------------------------------------------------------


def repeats_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed once more, after a retraction or a failure, is told once more."""

    def keep(owners: Any, found: Any) -> None:
        row = 0
        for req, kv, _, count in owners.prompts:
            if req.kv is kv:
                values, *tops = (
                    found[name][row : row + count].tolist() for name in ("logprobs", "top_values", "top_ids")
                )
                pairs = [list(zip(*one, strict=True)) for one in zip(*tops, strict=True)]
                seeking.WANTED.of(req).prompt += zip(values, pairs, strict=True)
            row += count

    monkeypatch.setattr(stage, "_keep_prompts", keep)
    seeker = vars(seeking)["_Seeker"]
    find = seeker.prompt

    def from_the_start(self: Any, req: Any, at: int, prefix: int, extend: int) -> None:
        """As if none of them were known."""
        wanted = seeking.WANTED.of(req)
        known, wanted.prompt = wanted.prompt, []
        find(self, req, at, prefix, extend)
        wanted.prompt = known

    monkeypatch.setattr(seeker, "prompt", from_the_start)


def loses_rows_of_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a failed step bring tokens only."""
    monkeypatch.setattr(Components, "rerun", lambda self, half: self.executor.rerun(half.work))


def loses_rows_of_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last part of a split prefill brings tokens only."""
    split: Any = Services.split
    monkeypatch.setattr(Services, "split", lambda *args, **more: replace(split(*args, **more), notes={}))


def packs_parts_of_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages see the first part of a split prefill, for which no token is drawn, in the place of the whole."""
    pack = Points.pack

    def changed(self: Any, step: Any) -> None:
        pack(self, step if step.whole is None else replace(step, whole=None))
        (step if step.whole is None else step.whole).packed = True

    monkeypatch.setattr(Points, "pack", changed)


def loses_rows_that_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wanted of a prompt, all but its last token may come from the cache."""
    monkeypatch.setattr(Req, "matchable_key", lambda self: self.key(max(0, self.seq_len - 1)))


def sends_rows_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the prompt come with every output."""
    send = RowOutputs.send

    def changed(self: Any, req: Any, start: int, stop: int) -> Any:
        whole, rows = send(self, req, 0, stop), send(self, req, start, stop)
        return whole and rows and replace(rows, whole=whole.whole)

    monkeypatch.setattr(RowOutputs, "send", changed)


def takes_the_rows_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of a tree gets the logprob of its place in what was gained, not that of its node."""
    take = vars(ResultProcessor)["_take"]

    def changed(self: Any, req: Any, result: Any, *args: Any) -> int:
        if (accepted := result.accepted) is not None:
            result = replace(result, accepted=replace(accepted, nodes=accepted.nodes * 0 + accepted.nodes[0]))
        return take(self, req, result, *args)

    monkeypatch.setattr(ResultProcessor, "_take", changed)


def drafts_what_has_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts for requests that want hidden states, of which a step brings one."""
    plan = TokensAhead.plan

    def changed(self: Any, running: Any) -> Any:
        flags = running.flags.copy()
        running.flags[:] &= ~SINGLE
        found = plan(self, running)
        running.flags[:] = flags
        return found

    monkeypatch.setattr(TokensAhead, "plan", changed)


def jumps_over_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that a grammar forces are taken also where the model is to say something of each."""
    monkeypatch.setattr(Req, "single", False)


# ---- stops -----------------------------------------------------------------------------------------------------------


def sees_the_last_token_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop string that comes across tokens is not found."""
    after = StopText.after

    def changed(self: Any, req: Any, token: int) -> FinishReason | None:
        self.matcher = StopMatcher(req.sampling.stop, self.matcher.compiled)
        return after(self, req, token)

    monkeypatch.setattr(StopText, "after", changed)


def stops_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever `min_new_tokens` says."""
    feed = StopMatcher.feed
    monkeypatch.setattr(StopMatcher, "feed", lambda self, piece, **more: feed(self, piece))


def ends_at_eos_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's own stop tokens are tokens like any other."""
    after = EndTokens.after
    monkeypatch.setattr(
        EndTokens, "after", lambda self, req, token: after(self, req, token) if token in req.eos_ids else None
    )


def forces_beyond_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops are not looked for among the tokens that a grammar forces."""
    advance = Constraints.advance

    def changed(self: Any, req: Any, token: int, finishers: Any, **more: Any) -> FinishReason | None:
        return advance(self, req, token, (), **more)

    monkeypatch.setattr(Constraints, "advance", changed)


# ---- embeddings ------------------------------------------------------------------------------------------------------


def runs_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is pooled joins the running batch when it is through."""
    extend = BatchBuilder.extend

    def changed(self: Any, items: Any, running: Any, **more: Any) -> Any:
        step = extend(self, items, running, **more)
        pooled = [item.req for item in items if not item.req.samples and not item.partial]
        if pooled:
            running.join(pooled, step.number)
        return step

    monkeypatch.setattr(BatchBuilder, "extend", changed)


def pools_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed once more is pooled once more."""
    pool = vars(RowOutputs)["_pool"]

    def changed(self: Any, req: Any, pooling: Any, *args: Any) -> None:
        pooling.first = -1
        pool(self, req, pooling, *args)

    monkeypatch.setattr(RowOutputs, "_pool", changed)


# ---- media -----------------------------------------------------------------------------------------------------------


def never_releases_media(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step has read is held for ever."""
    monkeypatch.setattr(EncoderCache, "release", lambda self, number: None)


def drops_media_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """By steps that are under way, or that will be run again in halves."""
    monkeypatch.setattr(EncoderCache, "held", property(lambda self: frozenset()))


def forgets_what_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step encodes what it wants, there or not."""
    plan = EncoderCache.plan

    def changed(self: Any, pieces: Any, keep: Any) -> Any:
        work = plan(self, pieces, keep)
        others = [key for key in self._sizes if key not in {one.key for one in work.pieces}]
        self.forget(others[:1])
        return replace(work, drop=(*work.drop, *others[:1]))

    monkeypatch.setattr(EncoderCache, "plan", changed)


def takes_pictures_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches see the tokens of media, which are the same for all."""
    monkeypatch.setattr(KeyedTokens, "key_view", lambda self, stop=None: self.view(0, stop))


def fails_all_media(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that cannot be encoded together are not tried one by one."""

    def failed(self: Any, step: Any, error: Exception) -> None:
        self.undo(step)
        self._core.end(step.reqs, str(error), "media_failed")

    monkeypatch.setattr(Encoding, "failed", failed)


# ---- loads -----------------------------------------------------------------------------------------------------------


def blames_requests_for_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that was lost is taken for a pass that failed."""
    monkeypatch.setattr(recovery, "StepLost", type("Other", (Exception,), {}))


def commits_failed_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a load was to bring is shared as if it had come."""
    rewind = Planner.rewind

    def changed(self: Any, step: Any) -> None:
        for kv in step.kvs:
            if kv.load is not None:
                kv.committed_len = kv.prefix_len
        rewind(self, step)

    monkeypatch.setattr(Planner, "rewind", changed)


def computes_halves_without_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a failed step take what is loaded to be there."""
    half = BatchBuilder.half

    def changed(self: Any, *args: Any) -> Any:
        step = half(self, *args)
        if step is not None:
            step.work.payloads.pop(NAME, None)
        return step

    monkeypatch.setattr(BatchBuilder, "half", changed)


def never_ends_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache does not hear that they are through."""
    monkeypatch.setattr(MemoryManager, "loaded", lambda self, kv, ok: None)


CHANGES: dict[Change, int] = {
    gives_memory_away: 4,
    goes_on_with_the_dead: 6,
    repeats_rows: 287,
    loses_rows_of_halves: 5,
    loses_rows_of_splits: 5,
    packs_parts_of_splits: 6,
    loses_rows_that_are_cached: 0,
    sends_rows_again: 6,
    takes_the_rows_of_others: 7,
    drafts_what_has_no_rows: 7,
    jumps_over_rows: 14,
    sees_the_last_token_only: 3,
    stops_too_early: 3,
    ends_at_eos_only: 3,
    forces_beyond_stops: 4,
    runs_embeddings: 0,
    pools_twice: 31,
    never_releases_media: 1,
    drops_media_that_are_read: 41,
    forgets_what_is_encoded: 1,
    takes_pictures_for_each_other: 22,
    fails_all_media: 10,
    blames_requests_for_loads: 1,
    commits_failed_loads: 0,
    computes_halves_without_loads: 255,
    never_ends_loads: 0,
}
"""Each with the seed that was the first to notice it, where the search begins."""
SEEDS = 400


@pytest.mark.full
@pytest.mark.parametrize("change", CHANGES)
def test_broken_company_is_noticed(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch)
    monkeypatch.setattr(test_company, "PATIENCE", 5.0)  # a hang is noticed, too
    for seed in range(CHANGES[change], CHANGES[change] + SEEDS):
        if noticed(change, partial(play, seed, monkeypatch)):
            return
    pytest.fail("nothing is noticed")
