"""Same tokens as one by one, whatever the scheduler does: every policy, both loops, chunks or none, mixed batches or
not, either page size, and a pool so small that running requests are retracted all the time.

The requests differ as users' do: some stream, some share prefixes, some sample with a seed, some end at stop strings,
have penalties, or want logprobs. What each is answered alone (a batch of one, a roomy pool, no chunks, no cache) is the
reference. An answer may leave it where two tokens are so close that the order of sums decides, and nowhere else; see
`tests.e2e.reference`, which the greedy references themselves are held against.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.covering import covering
from pegboard.core.engine.engine import Engine, GenerateOutput
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.sampling import SamplingBatch, SamplingParams
from pegboard.core.registry.registry import Registry
from tests.e2e.reference import MIN_COMPARED, NEAR_TIE, Comparison, Reference
from tests.token_prompts import prompt_ids

TIGHT, ROOMY = 288, 4096
"""Tokens of the pool. The longest request needs nearly all of the smaller one."""

EOS = 2
"""Of the tiny checkpoints."""

OFTEN = {1: 3, 16: 1}
"""Least retractions of a cell with the smaller pool. With large pages what a request grows into is there for longer."""

LOGPROB_TOLERANCE = 1e-3

POLICIES = sorted(one.name for one in Registry.discover(()).providers("schedule_policy") if not one.problem)


# ---- requests -------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A request, and what it is answered alone. `gaps` says of each token how far the runner-up was behind."""

    request: GenerateRequest
    late: bool
    """Whether it comes when others run already."""
    answer: GenerateOutput = field(default_factory=lambda: GenerateOutput(""))
    gaps: list[float] = field(default_factory=list)


def make_requests(vocab: int) -> list[GenerateRequest]:
    """Twenty requests: prompts of 3 to 262 tokens, half of them over one of two prefixes; answers of up to 64."""
    draw = np.random.default_rng(8)

    def ids(n: int) -> list[int]:
        return [int(token) for token in draw.integers(3, vocab, size=n)]

    stems = (ids(37), ids(20))
    prompts = [(stems[i % 2] if i % 4 < 2 else []) + ids(int(draw.integers(3, 26))) for i in range(18)]
    prompts += [ids(260), stems[0] + ids(225)]
    special: dict[int, dict[str, Any]] = {
        1: {"temperature": 0.9, "seed": 5},
        3: {"frequency_penalty": 0.6, "presence_penalty": 0.4},
        4: {"repetition_penalty": 1.3},
        6: {"temperature": 1.0, "seed": 6, "top_p": 0.9},
        # Each ends as soon as it may, so that a step counted too few or too many shows.
        0: {"min_new_tokens": 50, "max_new_tokens": 64, "logit_bias": {EOS: 90.0}},
        7: {"min_new_tokens": 44, "max_new_tokens": 64, "logit_bias": {EOS: 90.0, 11: 1.0}},
        11: {"min_new_tokens": 57, "max_new_tokens": 64, "logit_bias": {EOS: 90.0}},
        16: {"min_new_tokens": 47, "max_new_tokens": 64, "logit_bias": {EOS: 90.0}},
        9: {"temperature": 0.7, "seed": 7, "top_k": 20, "repetition_penalty": 1.1},
        12: {"ignore_eos": True},
        15: {"frequency_penalty": 0.3},
        19: {"temperature": 0.8, "seed": 8, "min_p": 0.02},
    }
    requests = []
    for i, prompt in enumerate(prompts):
        longest = int(draw.integers(40, 65)) if len(prompt) < 200 else 24
        params = {"temperature": 0.0, "max_new_tokens": longest, **special.get(i, {})}
        requests.append(
            GenerateRequest(
                prompt=prompt,
                rid=f"r{i}",
                sampling=SamplingParams(**params),
                stream=i % 3 != 0,
                priority=i % 4,
                logprobs=(None, 0, 3)[i % 3] if i % 2 else None,
                token_ids_logprob=(5, 9) if i == 5 else (),
            )
        )
    return requests


STOPS = {2: "stop", 5: "stop", 8: "stop_token_ids", 10: "stop", 14: "stop_token_ids"}
"""Which requests end in the middle of what they would say otherwise, and by what."""


STOP_LENGTH = 30
"""Characters of a stop string."""


def with_stop(request: GenerateRequest, full: GenerateOutput, kind: str) -> GenerateRequest:
    """The request, to be ended by something that its own answer contains."""
    if kind == "stop_token_ids":
        ids = full.token_ids
        late = next(token for i, token in enumerate(ids) if i >= len(ids) // 2 and token not in ids[:i])
        changed = {"stop_token_ids": (late,)}
    else:
        # Said by several tokens, some of them before a retraction and some after it.
        start = len(full.text) // 3
        changed = {"stop": ("never said", full.text[start : start + STOP_LENGTH])}  # type: ignore[dict-item]
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, **changed))


# ---- the reference --------------------------------------------------------------------------------------------------


class Gaps:
    """Records in an engine that runs one request at a time how clear each choice of its sampler was.

    A greedy token's gap is in logits, those of processors included. A drawn token counts as clear when it stays the
    same however the logits are nudged by as much as another order of sums may.
    """

    TRIALS = 4

    def __init__(self, engine: Engine) -> None:
        self.found: list[float] = []
        sampler = engine.built.runner.ctx.sampler
        self._sample, self._noise = sampler.sample, torch.Generator().manual_seed(1)
        sampler.sample = self.sample  # type: ignore[method-assign]

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        assert len(batch) == 1, "the reference runs alone"
        kept = logits.clone()
        tokens = self._sample(logits, batch)
        if batch.all_greedy:
            best = kept[0].double().topk(2).values
            self.found.append(float(best[0] - best[1]))
        else:
            same = all(torch.equal(tokens, self._sample(self._nudged(kept), batch)) for _ in range(self.TRIALS))
            self.found.append(float("inf") if same else 0.0)
        return tokens

    def _nudged(self, logits: torch.Tensor) -> torch.Tensor:
        return logits + (torch.rand(logits.shape, generator=self._noise) * 2 - 1) * (NEAR_TIE / 2)


@dataclass
class World:
    """A checkpoint and its cases."""

    checkpoint: Path
    cases: list[Case]

    def config(self, **more: Any) -> dict[str, Any]:
        return {
            "model": {"path": str(self.checkpoint), "dtype": "float32", "device": "cpu", "context_length": TIGHT},
            "attention": {"use": "torch"},
            "log_level": "warning",
            **more,
        }


@pytest.fixture(scope="module")
def world(checkpoints: Path) -> World:
    return make_world(tiny_checkpoint(checkpoints, "llama", num_hidden_layers=2))


def make_world(checkpoint: Path) -> World:
    """Each request alone. Those with stops run twice: what they would say without, and then with."""
    made = World(checkpoint, [])
    config = made.config(
        prefix_cache={"use": "none"},
        memory={"max_total_tokens": ROOMY},
        scheduler={"chunked_prefill_size": 0, "max_running_requests": 1},
    )
    with Engine.from_config(config) as engine:
        gaps = Gaps(engine)
        for i, request in enumerate(make_requests(engine.info.vocab_size)):
            answer = engine.run([request])[0]
            if i in STOPS:
                request = with_stop(request, answer, STOPS[i])
                gaps.found.clear()
                answer = engine.run([request])[0]
                assert answer.finish_reason["type"] == "stop"
            made.cases.append(Case(request, i % 5 in (2, 4), answer, gaps.found.copy()))
            gaps.found.clear()
        assert engine.stats()["retractions"] == 0
    return made


def test_the_reference_is_what_it_should_be(world: World, reference_dir: Path) -> None:
    """Plain greedy answers equal transformers', so that not everything here is wrong in the same way; and the cases
    are of all kinds.
    """
    plain = [
        case
        for case in world.cases
        if case.request.sampling == SamplingParams(temperature=0.0, max_new_tokens=case.request.sampling.max_new_tokens)
    ]
    assert len(plain) >= 3
    comparison, reference = Comparison(), Reference(world.checkpoint, reference_dir)
    for case in plain:
        (expected,) = reference.answers([case.request.prompt], len(case.answer.token_ids))  # type: ignore[list-item]
        comparison.add(case.answer.token_ids, expected, case.request.rid)
        assert case.gaps == pytest.approx(expected.gaps, abs=NEAR_TIE)
    comparison.finish()
    ends = {case.answer.finish_reason["type"] for case in world.cases}
    assert ends == {"stop", "length"}
    assert {type(case.answer.finish_reason.get("matched")) for case in world.cases} == {str, int, type(None)}
    clear = sum(gap >= NEAR_TIE for case in world.cases for gap in case.gaps)
    assert clear >= 0.97 * sum(len(case.gaps) for case in world.cases)


# ---- one arrangement ------------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """One arrangement."""

    policy: str
    loop: str
    chunk: int
    mixed: bool
    page_size: int
    tokens: int
    cache: str

    def config(self, world: World, **scheduler: Any) -> dict[str, Any]:
        return world.config(
            prefix_cache={"use": self.cache},
            memory={"page_size": self.page_size, "max_total_tokens": self.tokens},
            scheduler={
                "policy": {"use": self.policy},
                "loop": self.loop,
                "chunked_prefill_size": self.chunk,
                "mixed_chunk": self.mixed,
                "max_running_requests": 12,
                # In the tight pool admission reckons with next to no growth, so that running requests have to go.
                "estimate_max_new_tokens": 1 if self.tokens == TIGHT else 4096,
                **scheduler,
            },
        )

    def __str__(self) -> str:
        chunk = self.chunk or "off"
        mixed = "mixed" if self.mixed else "apart"
        pool = "tight" if self.tokens == TIGHT else "roomy"
        return f"{self.policy}-{self.loop}-chunk_{chunk}-{mixed}-{self.cache}-page_{self.page_size}-{pool}"


VALUES: tuple[Sequence[Any], ...] = (
    POLICIES,
    ("normal", "overlap"),
    (32, 256, 0),
    (False, True),
    (1, 16),
    (TIGHT, ROOMY),
    ("radix", "block"),
)


# Where nothing has to go, either cache is as good.
MATRIX = [
    cell
    for cell in (Cell(*values) for values in itertools.product(*VALUES))
    if cell.tokens == TIGHT or cell.cache == ("radix" if cell.page_size == 1 else "block")
]
FEW = covering(MATRIX)
REST = covering(MATRIX, 3, beside=FEW)


def ask(engine: Engine, cases: Iterable[Case]) -> list[GenerateOutput]:
    """All of them, some when others run already; every answer read to its end."""
    outputs = {case.request.rid: GenerateOutput(case.request.rid) for case in cases}
    early = [case.request for case in cases if not case.late]
    late = [case.request for case in cases if case.late]
    third = len(early) // 3
    streams = []
    for request in (one for one in early if one.stream):
        # The first token of each stream is waited for; what it goes on to say is read at the end.
        stream = engine.stream(request.prompt, request.sampling, **{name: getattr(request, name) for name in OPTIONS})
        outputs[request.rid].add(next(stream))
        streams.append((request.rid, stream))
        if len(streams) == third:
            break
    gone = {rid for rid, _ in streams}
    for output in engine.run([one for one in early if one.rid not in gone] + late):
        outputs[output.rid] = output
    for rid, stream in streams:
        for chunk in stream:
            outputs[rid].add(chunk)
    return list(outputs.values())


OPTIONS = ("rid", "priority", "logprobs", "token_ids_logprob")


def check(cases: Sequence[Case], outputs: Sequence[GenerateOutput]) -> None:
    """Every answer against the reference, up to a near-tie; at least nine tenths of all positions."""
    compared = 0
    for case, output in zip(cases, outputs, strict=True):
        rid = case.request.rid
        agreed = agreement(rid, output.token_ids, case)
        compared += agreed
        check_logprobs(rid, case, output, agreed)
        if agreed == len(case.answer.token_ids) == len(output.token_ids):
            assert output.finish_reason == case.answer.finish_reason, rid
            assert output.text == case.answer.text, rid
            assert output.prompt_tokens == len(prompt_ids(case.request))
    total = sum(len(case.answer.token_ids) for case in cases)
    assert compared >= MIN_COMPARED * total, f"only {compared} of {total} positions were compared"


def agreement(rid: str, found: Sequence[int], case: Case) -> int:
    """How many tokens agree before the two may differ; fails where they may not."""
    expected = case.answer.token_ids
    for position, (ours, theirs) in enumerate(itertools.zip_longest(found, expected)):
        if ours != theirs:
            assert position < len(case.gaps), f"{rid}: {len(found)} tokens, alone it has {len(expected)}"
            gap = case.gaps[position]
            assert gap < NEAR_TIE, f"{rid}: token {position} is {ours}, alone it is {theirs}, ahead by {gap:.4g}"
            return position
    return len(expected)


def check_logprobs(rid: str, case: Case, output: GenerateOutput, agreed: int) -> None:
    if case.request.logprobs is None:
        assert output.logprobs is None
        return
    assert output.logprobs is not None
    assert case.answer.logprobs is not None
    assert [token for _, token, _ in output.logprobs] == output.token_ids, f"{rid}: one entry per token"
    for ours, theirs in itertools.islice(zip(output.logprobs, case.answer.logprobs, strict=False), agreed):
        assert ours[0] == pytest.approx(theirs[0], abs=LOGPROB_TOLERANCE), rid
        assert len(ours[2]) == len(theirs[2])
        values = [[value for value, _ in top] for top in (ours[2], theirs[2])]
        assert values[0] == pytest.approx(values[1], abs=LOGPROB_TOLERANCE), rid


def run_cell(cell: Cell, world: World) -> dict[str, Any]:
    stats = run_config(cell.config(world), world)
    if cell.tokens == TIGHT:
        assert stats["retractions"] - stats["preemptions"] >= OFTEN[cell.page_size], "the pool was meant to be small"
    return stats


def run_config(config: dict[str, Any], world: World) -> dict[str, Any]:
    """The answers are right and the books balance. The engine's counters."""
    with Engine.from_config(config) as engine:
        outputs = ask(engine, world.cases)
        stats = engine.stats()
        memory = engine.built.scheduler.components.memory
        assert memory.idle_error() is None
        memory.cache.check()
    check(world.cases, outputs)
    assert stats["book_errors"] == stats["failed_batches"] == stats["aborted"] == stats["plugin_failures"] == 0
    assert stats["finished"] == len(world.cases)
    assert sum(output.num_retractions for output in outputs) == stats["retractions"]
    return stats


@pytest.mark.parametrize("cell", FEW, ids=str)
def test_every_pair_of_settings(cell: Cell, world: World) -> None:
    run_cell(cell, world)


@pytest.mark.parametrize(
    "scheduler",
    [
        {"split_prefill_layers": 1},
        {"prefill_first": True},
        {"max_prefill_tokens": 48, "max_running_requests": 3, "conservativeness": 0.5},
        {"estimate_max_new_tokens": 4096, "new_token_ratio": 0.05, "retract_lookahead": 0},
    ],
    ids=["split", "prefill_first", "few", "hopeful"],
)
@pytest.mark.parametrize(("loop", "page_size"), [pytest.param("normal", 1, marks=pytest.mark.full), ("overlap", 16)])
def test_other_settings(loop: str, page_size: int, scheduler: dict[str, Any], world: World) -> None:
    """What the matrix leaves alone."""
    chosen = Cell("lof", loop, 32, False, page_size, TIGHT, "radix").config(world, **scheduler)
    run_config(chosen, world)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cell", REST, ids=str)
def test_every_triple_of_settings(cell: Cell, world: World) -> None:
    run_cell(cell, world)
