"""All features of the scheduler in each other's company: KV that gates bring, holds, grammars that sit out or jump
ahead, drafts, split and mixed prefills, little memory, pauses, aborts, and forward passes that fail; rows beside
tokens, stops of all kinds, embeddings, media on a small encoder cache, and prefixes that come from the host or fail to.
Each request has its end, once, and gets what it would get alone.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegboard.core.engine.view import SchedulerView
from pegboard.core.interfaces.client import OutputChunk
from pegboard.core.interfaces.messages import AbortRequest, Accepted, TokenOutput
from pegboard.core.interfaces.stage import Stage
from pegboard.core.pipeline.points import encoded
from pegboard.core.registry.hooks import Hooks
from pegboard.plugins.grammar.work import GrammarWork, WorkLimits
from pegboard.plugins.media.encoder_cache import EncoderCache
from pegboard.plugins.media.work import NAME as MEDIA
from pegboard.plugins.row_outputs.messages import NAME
from pegboard_drills.grammars import ScriptedMatcher
from tests.core.pipeline.company import Asked, Author, Tokenizer
from tests.core.pipeline.company_model import CompanyModel, FakePooler, row_part
from tests.core.pipeline.harness import Seer
from tests.core.pipeline.tier_harness import SlotMover
from tests.features import FEATURES
from tests.plugins.kv_handoff.test_handoff import World
from tests.plugins.media.media_harness import TOKEN_BYTES, Album, books_of, stage_of

REQUESTS = 40
PATIENCE, MANY_STEPS = 60.0, 3000
HAPPENS = ("failed_batches", "preemptions", "drafted_tokens", "forced_tokens", "grammar_waits", "cached_host_tokens")
FOUND = (33,)
"""Seeds that have found something, while games are drawn as they are now; the tests beside this one say what."""
LUCK = "out of luck"
"""What the fake model says when it is told to fail."""


def forced(self: ScriptedMatcher) -> Sequence[int]:
    """Some scripts tell their next tokens ahead."""
    script = self._grammar.tokens
    return script[len(self.taken) : len(self.taken) + 4] if script and script[0] % 2 else ()


def arrangement(rng: random.Random) -> dict[str, Any]:
    page_size = rng.choice([1, 4])
    tokens = rng.choice([64, 96, 160])
    cache = rng.choice(["radix", "none", "block" if page_size == 4 else "radix", "hiradix", "hiradix"])
    more: dict[str, Any] = {
        "tokens": tokens,
        "page_size": page_size,
        "chunk": rng.choice([None, 4, 8]),
        "cache": cache,
        "policy": rng.choice(["fcfs", "priority"]),
        "new_token_ratio": rng.choice([0.1, 0.7]),
        "prefill_first": rng.random() < 0.3,
        "jump_ahead": rng.choice([0, 2]),
        "work": GrammarWork(WorkLimits(step_seconds=rng.choice([0.0, 1e-5, 60]), seconds=100)),
        **rng.choice([{}, {"split_prefill_layers": 2}, {"mixed_chunk": True}]),
    }
    if cache == "hiradix":
        more["mover"] = SlotMover(rng.choice([128, 1024]) // page_size, page_size, seed=rng.randrange(1000))
        more["max_load_tokens"] = rng.choice([16, 4096])
    if rng.random() < 0.5:
        more["speculator"] = Seer(rng.random(), rng.choice(["chain", "tree"]))
    return more


def beside(output: TokenOutput) -> OutputChunk:
    """What an output brings beside tokens."""
    chunk = OutputChunk(output.rid, "", [], None, 0, 0, 0)
    FEATURES.finish(chunk, output)
    return chunk


class CompanyWorld(World):
    """Gates bring what the model keeps of a prompt."""

    asked: dict[str, Asked]

    def kept(self, rid: str) -> Sequence[int]:
        return self.asked[rid].kept


class Company:
    """A world whose requests, accidents and operator are drawn from a seed; the clock says which grammars sit out."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.rng = rng = random.Random(seed)
        limits = {"timeout": rng.choice([None, 0.5]), "hold_timeout": rng.choice([None, 0.4])}
        more = self.arrange()
        pooler = FakePooler(rng.choice([None, 1, 5]))
        # Of 9 tokens a piece at most, the small one holds what a page of a prompt reads.
        small = 20 if more["page_size"] == 1 else 40
        books = EncoderCache(rng.choice([small, small, 400]) * TOKEN_BYTES, TOKEN_BYTES, rng.choice([9, 20]), 1)
        media = stage_of(books, more["page_size"], directory)
        self.world = CompanyWorld(
            rng.choice(["normal", "overlap"]),
            grammars=True,
            model=self.model_of(more),
            tokenizer=Tokenizer(),
            pooler=pooler,
            joining=[media, *self.stages(more)],
            lanes=random.Random(f"lanes {seed}").choice([1, 2]),
            **limits,
            **more,
        )
        self.asked = self.world.asked = {}
        self.scheduler = self.world.harness.scheduler
        self.operator = SchedulerView(self.scheduler, Hooks())
        self.author = Author(rng, Album(directory, seed), pooler)
        self.mover: SlotMover | None = more.get("mover")
        self.aborted: set[str] = set()
        assert isinstance(self.world.harness.model, CompanyModel)
        self.model = self.world.harness.model
        self._arrange_accidents(directory, books.capacity, pooler)

    brings = True
    """Whether gates bring KV that was computed elsewhere."""

    def arrange(self) -> dict[str, Any]:
        return arrangement(self.rng)

    def model_of(self, more: dict[str, Any]) -> type[CompanyModel]:
        return CompanyModel

    def stages(self, more: dict[str, Any]) -> Sequence[Stage]:
        """Further stages that take part."""
        return ()

    def _arrange_accidents(self, directory: Path, capacity: int, pooler: FakePooler) -> None:
        rng, model = self.rng, self.model
        model.directory, model.capacity, model.device_parts = directory, capacity, {NAME: row_part(pooler)}
        if self.mover is not None:
            model.mover, self.mover.slots = self.mover, model.slots
            model.fail_loads = rng.choice([0.0, 0.3, 0.3])
        # Passes that fail whatever they are of cost requests; those that fail only together cost none.
        self.failing, most = rng.choice([(0.0, 0), (0.03, 0), (0.1, 1)])
        self.costly = self.failing > 0 and most == 0
        model.fail_on = lambda work: len(work.rows) > most and rng.random() < self.failing
        flaky = rng.choice([0.0, 0.2])
        model.flaky = lambda: rng.random() < flaky

    def step(self) -> None:
        # Not `World.step`: what a gate follows may be undefined where a pass has failed.
        if self.mover is not None:
            self.mover.advance()
        self.model.broken = frozenset(self.author.broken)
        for output in self.world.harness.step():
            if output.finish_reason is not None:
                self.author.forget(output.rid)
        self.world.clock.advance(0.02)
        if self.scheduler.resting:
            time.sleep(0.0005)  # the thread with the matchers has its turn

    def post(self, number: int) -> None:
        rng, world, rid = self.rng, self.world, f"r{number}"
        asked = self.asked[rid] = self.author.write(rid)
        more: dict[str, Any] = {
            "priority": rng.randrange(3),
            "stream": asked.stream,
            "sampling": asked.sampling,
            "embed": asked.embed,
            "return_hidden_states": asked.wants_hidden,
            "logprobs": 1 if asked.wants_logprobs else None,
            "logprob_start": asked.logprob_start,
            "features": {} if asked.media is None else {MEDIA: encoded(asked.media.media)},
        }
        kind = rng.random() / max(self.author.gates, 1e-9)
        if kind < 0.5 and not asked.embed and self.brings:
            # Hidden states do not come with the drill gate's tokens.
            token = asked.tokens[0] if rng.random() < 0.8 and not asked.wants_hidden else None
            asked.brought = token
            drill = {"token": token, "delay": rng.random() / 4, "linger": rng.choice([0.0, 1e-20, 0.3])}
            reply = world.bring(rid, asked.ids, asked.n, drill=drill, **more)
        else:
            reply = world.submit(rid, asked.ids, asked.n, drill={"hold": 0.2} if kind < 0.8 else None, **more)
        assert isinstance(reply, Accepted), reply

    def disturb(self) -> None:
        rng, scheduler = self.rng, self.scheduler
        alive = list(scheduler.requests.alive)
        if rng.random() < 0.15 and alive:
            self.aborted.add(rid := rng.choice(alive))
            scheduler.receive([AbortRequest(rid=rid)])
        if rng.random() < 0.07:
            self.operator.pause(rng.choice(["retract", "in_place"]))
            for _ in range(3):
                self.step()
            self.operator.resume()
        if rng.random() < 0.005:
            self.aborted |= {*scheduler.requests.alive}
            scheduler.receive([AbortRequest(all_requests=True)])

    def run(self) -> None:
        for number in range(REQUESTS):
            self.post(number)
            for _ in range(self.rng.randint(0, 5)):
                self.step()
            self.disturb()
        until, steps = time.monotonic() + PATIENCE, 0
        while not self.scheduler.idle:
            # A busy machine may take its time, but not many steps.
            hangs = steps > MANY_STEPS and time.monotonic() > until
            assert not hangs, f"it hangs: {self.scheduler.requests.alive}, {self.scheduler.info()}"
            self.step()
            steps += 1
        self.check()

    def check(self) -> None:
        scheduler, world = self.scheduler, self.world
        world.harness.run(1)
        assert self.model.wrong == []
        info = scheduler.info()
        left = ("waiting", "running", "blocked", "held", "seated")
        assert [info[f"{name}_requests"] for name in left] == [0] * len(left)
        assert info["quarantined_tokens"] == 0
        assert not world.keeper, "a gate thinks that it has requests"
        assert sum(world.keeper.failures_by.values()) == 0
        assert scheduler.counters.finished == REQUESTS
        for asked in self.asked.values():
            self.check_answer(asked)
        books = books_of(world.harness)
        assert not books.held, "media that no step reads are held"
        assert {key for key in self.model.encoded if key in books} == set(self.model.encoded)
        assert len(self.model.encoded) == len(books)
        often = Counter(self.model.shown)
        if len(self.model.shown) * 9 * TOKEN_BYTES <= books.capacity:
            assert max(often.values(), default=1) == 1, "media are encoded again that nothing has displaced"

    def check_answer(self, asked: Asked) -> None:
        """It has ended as it should, with what it was to get."""
        rid, harness = asked.rid, self.world.harness
        reason, tokens = harness.finish(rid), harness.tokens(rid)
        outputs = harness.outputs[rid]
        whole = reason["type"] != "abort"
        if whole:
            count, end = asked.end
            assert (len(tokens), reason) == (count, end), rid
        else:
            self.check_failure(asked, reason)
        assert tokens == asked.tokens[: len(tokens)], rid
        logprobs = [entry for output in outputs for entry in output.logprobs or ()]
        assert logprobs == (asked.logprobs(len(tokens)) if asked.wants_logprobs else []), rid
        prompts = [one.input_logprobs for one in map(beside, outputs) if one.input_logprobs is not None]
        expected = asked.prompt_logprobs()
        if whole:
            # Where the prompt is not computed here, there are none of it.
            none = expected is None or asked.brought is not None
            assert prompts == ([] if none else [expected]), rid
        else:
            assert len(prompts) <= 1
            assert all(one == (expected or [])[: len(one)] for one in prompts), rid
        states = [number for one in map(beside, outputs) for state in one.hidden_states or () for number in state]
        assert states == (asked.hidden(len(tokens)) if asked.wants_hidden else []), rid
        vector = [number for one in map(beside, outputs) for number in one.vector or ()]
        if whole or vector:
            assert vector == (self.author.pooler.vector(np.array(asked.kept)) if asked.embed else []), rid

    def check_failure(self, asked: Asked, reason: dict[str, Any]) -> None:
        """There is a reason why it has failed; a load that was lost is none."""
        status, message = reason.get("status"), reason.get("message") or ""
        if status == 499:
            assert asked.rid in self.aborted
        elif reason.get("code") == "media_failed":
            assert asked.broken, message
        elif status == 500:
            assert self.costly, message
            assert LUCK in message, message
        else:
            assert "time" in reason.get("code", ""), reason

    def played(self) -> Counter[str]:
        """How often what was there to be played, by its name; only answers that are whole count."""
        info = self.scheduler.info()
        found = Counter({name: int(info.get(name, 0)) for name in HAPPENS})  # type: ignore[call-overload]
        found += Counter(
            loads=len(self.model.loads), failed_loads=self.model.failed_loads, encoded=len(self.model.shown)
        )
        for asked in self.asked.values():
            reason, last = self.world.harness.finish(asked.rid), self.world.harness.outputs[asked.rid][-1]
            if reason["type"] == "abort":
                continue
            found[f"{reason['type']} {type(reason.get('matched')).__name__}"] += 1
            for name in ("embed", "wants_hidden", "wants_logprobs", "logprob_start", "media", "script", "brought"):
                if getattr(asked, name):
                    found[name] += 1
                    found[f"{name}, retracted"] += int(last.num_retractions > 0)
        return found


def play(seed: int, monkeypatch: pytest.MonkeyPatch) -> Company:
    monkeypatch.setattr(ScriptedMatcher, "forced", forced)
    with tempfile.TemporaryDirectory() as directory:
        company = Company(seed, Path(directory))
        company.run()
    return company


@pytest.mark.parametrize("seed", range(30))
def test_all_at_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    play(seed, monkeypatch)


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found_before(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    play(seed, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("first", [100, 160])
def test_some_seeds(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Counter[str]()
    for seed in range(first, first + 60):
        played.update(play(seed, monkeypatch).played())
    assert not [name for name, times in played.items() if not times], played
    assert len(played) == 6 + 3 + 4 + 2 * 7, played


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_five_thousand_seeds(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """OMP_NUM_THREADS=1 python -m pytest -n 0 -m soak tests/core/pipeline/test_company.py, an hour or so."""
    for seed in range(1000, 6000):
        with monkeypatch.context() as patched:  # which keeps all that it patches
            play(seed, patched)
        caplog.clear()  # the tracebacks of failed passes hold all there was
