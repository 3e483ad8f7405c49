"""Games with models whose layers keep more than one group of KV, or states: each request gets what it would get alone,
and prefixes are reused as far as what is kept of them reaches.

A test class inherits from `GroupGames`, and says how to make its harness.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pegboard.core.interfaces.messages import AbortRequest
from tests.core.pipeline.group_models import GroupModel
from tests.core.pipeline.harness import IGNORE, Harness, oracle, prompts

LOOPS = pytest.mark.parametrize("loop", ["normal", "overlap"])
PAGES = pytest.mark.parametrize("page_size", [1, 16])
SHARED = [at % 199 + 3 for at in range(150)]


def own(number: int, length: int) -> list[int]:
    """Tokens that no other request has."""
    return [(number * 83 + at * 7) % 241 + 8 for at in range(length)]


def cached(harness: Harness, rid: str) -> int:
    """How many of a request's tokens were computed before."""
    return harness.outputs[rid][-1].cached_tokens


class GroupHarness(Harness):
    """What a harness of these games has beside that of every scheduler."""

    group_model: GroupModel

    @property
    def kept(self) -> int:
        """How many prefixes something is kept of beside KV."""
        raise NotImplementedError


def arrangement(rng: random.Random) -> dict[str, Any]:
    page_size = rng.choice([1, 4])
    return {
        "page_size": page_size,
        "cache": rng.choice(["radix", "radix", "none", "block" if page_size == 4 else "radix"]),
        "tokens": rng.choice([160, 256, 2048]),
        "chunk": rng.choice([None, 4, 16]),
        "loop": rng.choice(["normal", "overlap"]),
        "mixed_chunk": rng.random() < 0.5,
        "prefill_first": rng.random() < 0.3,
        "policy": rng.choice(["fcfs", "priority"]),
        "every": rng.choice([4, 8, 32]),
        "new_token_ratio": rng.choice([0.1, 0.7]),
    }


class GroupGames:
    """`ample` is what a harness needs for all that is asked of it to be kept."""

    ample: Mapping[str, Any] = {}

    def make(self, **more: Any) -> GroupHarness:
        """Return a harness. Override."""
        raise NotImplementedError

    def draw(self, rng: random.Random) -> GroupHarness:
        """Return a harness in which something is short, perhaps. Override."""
        raise NotImplementedError

    def lose(self, harness: GroupHarness, luck: random.Random, rng: random.Random) -> None:
        """Have something further happen to passes."""

    # ---- games -----------------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("seed", range(12))
    def test_each_request_gets_what_it_would_get_alone(self, seed: int) -> None:
        self.play(seed)

    @pytest.mark.parametrize(
        "first",
        [
            pytest.param(1000, marks=pytest.mark.full),
            *(pytest.param(at, marks=pytest.mark.soak) for at in (1100, 1200, 1300)),
        ],
    )
    def test_many_more(self, first: int) -> None:
        for seed in range(first, first + 100):
            self.play(seed)

    @LOOPS
    def test_a_fault_in_every_fifth_pass_changes_no_other_answer(self, loop: str) -> None:
        """Not even that of the requests that were in it, where it was not one request alone."""
        harness, passes = self.make(loop=loop, every=8, chunk=16, **self.ample), 0

        def fails(work: Any) -> bool:
            nonlocal passes
            passes += 1
            return passes % 5 == 0 and len(work.rows) > 1

        harness.model.fail_on = fails
        asked = {f"r{at}": prompt for at, prompt in enumerate(prompts(16, seed=3))}
        self.ask(harness, asked, 12)
        assert harness.scheduler.counters.failed_batches > 10

    def ask(self, harness: GroupHarness, asked: Mapping[str, Sequence[int]], n: int) -> None:
        """Have requests answered, and compare."""
        for rid, prompt in asked.items():
            harness.submit(rid, prompt, n, **IGNORE)
        harness.run()
        for rid, prompt in asked.items():
            assert harness.tokens(rid) == oracle(prompt, n, ignore_eos=True), rid

    def play(self, seed: int) -> None:
        """Requests with shared prefixes, little memory, aborts, and passes that fail early or late."""
        rng, luck = random.Random(seed), random.Random(seed)
        harness = self.draw(rng)
        failing, late = (rng.choice([0.0, 0.0, 0.1]) for _ in range(2))
        harness.model.fail_on = lambda work: len(work.rows) > 1 and luck.random() < failing
        harness.group_model.late = lambda work: len(work.rows) > 1 and luck.random() < late
        self.lose(harness, luck, rng)
        asked = {f"r{at}": (prompt, rng.randint(1, 24)) for at, prompt in enumerate(prompts(24, seed=seed))}
        aborted = set()
        for rid, (prompt, n) in asked.items():
            harness.submit(rid, prompt, n, priority=rng.randint(0, 2))
            for _ in range(rng.randint(0, 3)):
                harness.step()
            if rng.random() < 0.1:
                harness.scheduler.receive([AbortRequest(rid=rid)])
                aborted.add(rid)
        harness.run()
        for rid, (prompt, n) in asked.items():
            if rid not in aborted:
                assert harness.tokens(rid) == oracle(prompt, n), rid

    # ---- prefixes --------------------------------------------------------------------------------------------------
    @PAGES
    @pytest.mark.parametrize("chunk", [None, 64])
    def test_a_shared_prefix_is_computed_twice_at_most(self, page_size: int, chunk: int | None) -> None:
        harness = self.make(every=32, page_size=page_size, chunk=chunk, **self.ample)
        for number in range(5):
            self.ask(harness, {f"r{number}": SHARED + own(number, 70)}, 4)
        assert cached(harness, "r0") == 0
        assert [cached(harness, f"r{number}") >= len(SHARED) - page_size for number in (2, 3, 4)] == [True] * 3

    @PAGES
    def test_the_same_prompt_again_begins_at_its_last_page(self, page_size: int) -> None:
        harness = self.make(every=32, page_size=page_size, **self.ample)
        for rid in ("a", "b"):
            self.ask(harness, {rid: SHARED}, 4)
        assert cached(harness, "b") == (len(SHARED) - 1) // page_size * page_size

    @LOOPS
    def test_the_next_turn_begins_in_the_answer_before(self, loop: str) -> None:
        harness = self.make(every=16, page_size=4, loop=loop, **self.ample)
        self.ask(harness, {"a": SHARED}, 50)
        said = [*SHARED, *harness.tokens("a")]
        self.ask(harness, {"b": [*said, *own(1, 9)]}, 4)
        assert cached(harness, "b") >= len(said) - 16 - 4

    def test_what_is_retracted_goes_on_from_its_last_page(self) -> None:
        harness = self.make(every=1000, page_size=1)
        harness.submit("a", SHARED[:40], 30, **IGNORE)
        for _ in range(10):
            harness.step()
        (req,) = harness.scheduler.running.reqs
        done = req.kv.committed_len
        harness.scheduler.planner.retract(req)
        computed = len(harness.model.batches)
        harness.run()
        assert int(harness.model.batches[computed].prefix_lens[0]) == done, (
            "more is computed again than the newest token"
        )

    def test_namespaces_share_nothing(self) -> None:
        harness = self.make(every=16, page_size=4, **self.ample)
        for rid, salt in (("a", "x"), ("b", "y"), ("c", "x")):
            harness.submit(rid, SHARED, 4, namespace=salt)
            harness.run()
        assert cached(harness, "b") == 0
        assert cached(harness, "c") > 0

    @LOOPS
    def test_what_was_never_computed_is_not_kept(self, loop: str) -> None:
        """A prompt's pass fails for it alone: others with its prefix must not go on from what it was to leave."""
        harness = self.make(every=8, loop=loop, **self.ample)
        harness.model.fail_on = lambda work: 7 in work.input_ids[:1]
        harness.submit("bad", [7, *SHARED], 4)
        harness.run()
        assert harness.finish("bad")["status"] == 500
        assert not harness.kept
        harness.model.fail_on = lambda work: False
        for rid in ("a", "b"):
            self.ask(harness, {rid: [7, *SHARED]}, 4)
