"""Drafts in the scheduler: answers stay what they are, ends are where they are, and memory is nobody's loss."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pegboard.conformance.covering import covering
from pegboard.core.interfaces.sampling import Grammar
from pegboard.core.interfaces.trees import TokenTrees
from pegboard.plugins.speculation.api import DraftRow
from pegboard.toolkit.sampling import tree
from pegboard_drills.grammars import ScriptedGrammar, ScriptedMatcher
from tests.core.pipeline.harness import EOS, Harness, Seer, next_token, oracle, prompts
from tests.core.pipeline.harness import said as told
from tests.plugins.grammar.test_state import harness as grammar_harness

ROOMY, TIGHT = 4096, 320
MATRIX = list(
    itertools.product(
        ("chain", "tree"), (0.0, 0.6, 1.0), ("radix", "block"), (1, 4, 16), (None, 16), (False, True), (ROOMY, TIGHT),
        ("normal", "overlap"),
    )
)  # fmt: skip
PAIRS = covering(MATRIX)
TRIPLES = [pytest.param(*case, marks=pytest.mark.full) for case in covering(MATRIX, 3, beside=PAIRS)]


@pytest.mark.parametrize(
    ("shape", "rate", "cache", "page_size", "chunk", "mixed", "tokens", "loop"), [*PAIRS, *TRIPLES]
)
def test_same_tokens_whatever_is_drafted(
    shape: str, rate: float, cache: str, page_size: int, chunk: int | None, mixed: bool, tokens: int, loop: str
) -> None:
    seer = Seer(rate, shape)
    harness = Harness(
        speculator=seer,
        loop=loop,
        cache=cache,
        page_size=page_size,
        tokens=tokens,
        chunk=chunk,
        mixed_chunk=mixed,
        estimate_max_new_tokens=1 if tokens == TIGHT else 4096,
    )
    ignoring = 3 if tokens == ROOMY else 8
    asked = prompts(24, seed=page_size)
    for i, prompt in enumerate(asked):
        harness.submit(f"r{i}", prompt, 30, stream=bool(i % 2), sampling={"ignore_eos": i % ignoring == 0})
        if i % 5 == 0:
            harness.step()
    harness.run()
    for i, prompt in enumerate(asked):
        assert harness.tokens(f"r{i}") == oracle(prompt, 30, ignore_eos=i % ignoring == 0), f"request {i}"
    counters = harness.scheduler.counters
    assert counters.failed_batches == 0
    assert counters.generated_tokens == sum(len(harness.tokens(rid)) for rid in harness.outputs)
    drafts = harness.drafts
    assert drafts.drafted_tokens >= drafts.accepted_tokens
    if rate:
        assert drafts.accepted_tokens > 0
    assert len(seer.learnt) == drafts.drafted_requests
    assert sum(offered - 1 for offered, _ in seer.learnt) == drafts.drafted_tokens
    assert sum(gained - 1 for _, gained in seer.learnt) == drafts.accepted_tokens
    ends = [told(harness.outputs[f"r{i}"][-1]) for i in range(len(asked))]
    assert sum(end.drafted for end in ends) == drafts.drafted_tokens
    assert sum(end.accepted for end in ends) == drafts.accepted_tokens
    if tokens == TIGHT and page_size < 16:
        assert counters.retractions > 0, "the pool was meant to be too small"


def test_right_drafts_save_steps() -> None:
    prompt, steps = prompts(1, shortest=20)[0], {}
    for nodes in (2, 4, 8):
        harness = Harness(speculator=Seer(1.0, nodes=nodes), speculation={"adaptive": False, "max_nodes": nodes})
        harness.submit("r", prompt, 100, sampling={"ignore_eos": True})
        harness.run()
        last = harness.outputs["r"][-1]
        steps[nodes] = harness.scheduler.counters.decode_steps
        assert last.completion_tokens - told(last).accepted == steps[nodes] + 1
    # The seer drafts between none and all that it may: half of them.
    assert 99 / steps[2] > 1.4
    assert 99 / steps[8] > 3


# ---- ends -----------------------------------------------------------------------------------------------------------


def ends_of(sampling: dict[str, Any], n: int, speculator: Seer | None) -> tuple[list[int], dict[str, Any], Any]:
    harness = Harness(speculator=speculator, tokenizer=Letters())
    harness.submit("r", PROMPT, n, sampling={"ignore_eos": True, **sampling}, stream=True)
    harness.run()
    last = harness.outputs["r"][-1]
    assert last.completion_tokens == len(harness.tokens("r"))
    assert harness.scheduler.counters.generated_tokens == last.completion_tokens
    reason = harness.finish("r")
    return harness.tokens("r"), reason, last


class Letters:
    """A decoder in which each token is a letter of its own."""

    special_ids: frozenset[int] = frozenset()
    token_bytes = None

    def id_to_token(self, token_id: int) -> str:
        return self.decode([token_id])

    @staticmethod
    def decode(ids: Any, **_: Any) -> str:
        return "".join(chr(0x4E00 + int(token)) for token in ids)


PROMPT = prompts(1, seed=4, shortest=30)[0]
SAID = oracle(PROMPT, 40, ignore_eos=True)


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("kind", ["length", "stop_token_ids", "stop"])
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.full)])
def test_an_end_within_what_was_accepted(kind: str, shape: str, every: int) -> None:
    """Whatever ends an answer, at each of its positions: nothing behind it leaves the scheduler."""
    inside = 0
    for position in range(0, 40, every):
        said = SAID[: position + 1]
        if kind != "length" and SAID.index(said[-1]) != position:
            continue  # it would end before
        sampling: dict[str, Any] = {}
        if kind == "stop_token_ids":
            sampling = {"stop_token_ids": (said[-1],)}
        elif kind == "stop":
            sampling = {"stop": (Letters.decode(said[-2:]),)}
        n = position + 1 if kind == "length" else 40
        plain, drafted = ends_of(sampling, n, None), ends_of(sampling, n, Seer(0.9, shape))
        assert drafted[:2] == plain[:2] == (said, plain[1]), f"position {position}"
        inside += told(drafted[2]).accepted
    assert inside > 20


def test_eos_within_what_was_accepted() -> None:
    """The model's own end, wherever it comes in a run."""
    asked = [one for one in prompts(400, seed=9, longest=12) if EOS in oracle(one, 24)][:12]
    harness = Harness(speculator=Seer(1.0))
    for i, prompt in enumerate(asked):
        harness.submit(f"r{i}", prompt, 40)
    harness.run()
    for i, prompt in enumerate(asked):
        assert harness.tokens(f"r{i}") == oracle(prompt, 40)
        assert harness.finish(f"r{i}") == {"type": "stop", "matched": EOS}
    assert harness.scheduler.counters.generated_tokens == sum(len(oracle(prompt, 40)) for prompt in asked)


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_drafts_never_push_a_request_out() -> None:
    """A pool that just holds the requests, without drafts, holds them with drafts."""
    asked = [prompts(1, seed=seed, shortest=20, longest=20)[0] for seed in range(4)]
    for tokens in range(4 * 52 + 4, 4 * 52 + 40, 12):
        for speculator in (None, Seer(0.3), Seer(0.3, "tree")):
            harness = Harness(speculator=speculator, tokens=tokens, cache="none", run=1)
            for i, prompt in enumerate(asked):
                harness.submit(f"r{i}", prompt, 32, sampling={"ignore_eos": True})
            harness.run()
            assert harness.scheduler.counters.retractions == 0, tokens


@pytest.mark.parametrize("page_size", [1, 4])
def test_slots_ahead_are_given_back_before_a_request_goes(page_size: int) -> None:
    """Those of a run that was given at once while memory was plentiful, too."""
    asked = [prompts(1, seed=seed, shortest=20, longest=20)[0] for seed in range(4)]
    harness = Harness(tokens=4 * 56, cache="none", page_size=page_size, run=16)
    for i, prompt in enumerate(asked):
        harness.submit(f"r{i}", prompt, 32)
    harness.run()
    assert harness.scheduler.counters.retractions == 0


# ---- a speculator that fails ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["raises", "lies", "late", "learn", "concerns"])
def test_a_speculator_that_fails_is_switched_off(what: str, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    class Bad(Seer):
        calls = 0

        def propose(self, rows: Any) -> Any:
            self.calls += 1
            if what == "raises":
                raise OSError("no oracle today")
            found = super().propose(rows)
            if what == "lies":
                found.tokens[0] = (found.tokens[0] + 1) % 200
            return found

        def learn(self, *arguments: Any) -> None:
            if what == "learn":
                raise OSError("nothing learnt")

        def concerns(self, params: Any) -> bool:
            if what == "concerns":
                raise OSError("no concern of mine")
            return True

    if what == "late":
        monkeypatch.setattr("pegboard.plugins.speculation.stage.LATE_SECONDS", 0.0)
    bad = Bad(1.0)
    harness = Harness(speculator=bad)
    asked = prompts(12)
    for i, prompt in enumerate(asked):
        harness.submit(f"r{i}", prompt, 60)
    harness.run()
    for i, prompt in enumerate(asked):
        assert harness.tokens(f"r{i}") == oracle(prompt, 60)
    if what in {"raises", "lies", "late"}:
        assert bad.calls == 10 + (what == "late")  # the first time is forgiven
    assert (harness.drafts.verify_steps > 0) == (what == "learn")
    assert harness.scheduler.info()["plugin_failures_by"] == {"speculator": {"Bad": 10}}
    told = [record.message for record in caplog.records if "speculator" in record.message]
    assert len(told) == 2
    assert "is off now" in told[1]


def test_one_that_fails_now_and_then_goes_on() -> None:
    class Moody(Seer):
        calls = 0

        def propose(self, rows: Any) -> Any:
            self.calls += 1
            if self.calls % 3:
                raise OSError("not now")
            return super().propose(rows)

    harness = Harness(speculator=Moody(1.0))
    asked = prompts(6)
    for i, prompt in enumerate(asked):
        harness.submit(f"r{i}", prompt, 30)
    harness.run()
    for i, prompt in enumerate(asked):
        assert harness.tokens(f"r{i}") == oracle(prompt, 30)
    assert harness.drafts.accepted_tokens > 0


def test_a_failed_pass_is_tried_in_parts_with_its_drafts() -> None:
    harness = Harness(speculator=Seer(1.0, "tree"))
    asked = prompts(6, shortest=5)
    failed: set[int] = set()

    def fails(work: Any) -> bool:
        first = work.trees is not None and len(work.rows) > 1 and work.bid not in failed
        failed.add(work.bid)
        return first

    harness.model.fail_on = fails
    for i, prompt in enumerate(asked):
        harness.submit(f"r{i}", prompt, 30)
    harness.run()
    for i, prompt in enumerate(asked):
        assert harness.tokens(f"r{i}") == oracle(prompt, 30)
    assert harness.scheduler.counters.failed_batches > 3
    assert harness.drafts.accepted_tokens > 0


FREE = 3
BOUND = range(100, 110)


class BindsLater(ScriptedMatcher):
    """Allows any token at first, and then some only, as a structural tag does behind its trigger."""

    def fill(self, mask: NDArray[np.int32], row: int) -> bool:
        if len(self.taken) < FREE:
            return False
        bits = np.zeros(mask.shape[1] * 32, np.uint8)
        bits[BOUND.start : BOUND.stop] = 1
        mask[row] = np.packbits(bits, bitorder="little").view(np.int32)
        return True

    def accept(self, token: int) -> bool:
        if len(self.taken) >= FREE and token not in BOUND:
            return False
        self.taken.append(token)
        return True

    @property
    def terminated(self) -> bool:
        return False


def bound_later(prompt: Sequence[int], n: int) -> list[int]:
    out: list[int] = []
    while len(out) < n:
        token = next_token(np.array([*prompt, *out], np.int64))
        out.append(token if len(out) < FREE else BOUND[token % len(BOUND)])
    return out


class KnowsWhatIsBound(Seer):
    def tree_of(self, row: DraftRow) -> TokenTrees:
        known, done = row.tokens.tolist(), row.tokens.shape[0] - row.input_len
        return tree.chains([(known[-1], bound_later(known[: row.input_len], 20)[done : done + row.most - 1])])


@pytest.mark.parametrize("speculator", [None, KnowsWhatIsBound(1.0)], ids=["alone", "drafts"])
def test_a_grammar_that_binds_behind_the_root(speculator: Seer | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other request of the step is bound, either."""
    monkeypatch.setattr(ScriptedGrammar, "matcher", lambda self: BindsLater(self))
    harness = grammar_harness(speculator=speculator)
    harness.submit("a", [3, 1, 4, 1, 5], 10, sampling={"grammar": Grammar("regex", "tokens 1 2")})
    harness.run()
    assert harness.tokens("a") == bound_later([3, 1, 4, 1, 5], 10)
    assert speculator is None or harness.drafts.accepted_tokens > 5
