"""How speculators treat the scheduler's loop and the requests that are gone: a part of the suite of Speculator."""

from __future__ import annotations

import contextlib
import itertools
import json
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from pegboard.conformance.rig.blocking import no_waiting
from pegboard.conformance.rig.dying import work_and_die
from pegboard.conformance.rig.footprint import growth, with_class
from pegboard.conformance.rig.steps import TooManySteps
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.plugins.speculation.suite.checks import MOST, VOCAB, PlainTree, plain, step_counter
from pegboard.plugins.speculation.suite.rig import Life, SpeculatorRig, step

LENGTHS = (256, 2048, 32768)
"""Tokens of texts over which the work of a step must not grow."""

PROMPTS = (16384, 131072)
"""Tokens of prompts over which the work of a first step must not grow: more than a call may take on at once."""

SLACK_STEPS = 1000
SLACK_BYTES = 200_000
"""Less than a copy of the longest of LENGTHS takes."""

MANY = 400
KEPT_BYTES = 32
"""Bytes that may be kept of each of so many requests."""


class ConductTests(SpeculatorRig):
    """No call waits, none does more for a longer text, and what is kept of a request goes with its memo."""

    def test_no_call_waits(self) -> None:
        speculator = self.new()

        def watched(call: str) -> AbstractContextManager[None]:
            return no_waiting(call, _NO_DRAFT, files=False)

        with no_waiting("concerns", _NO_DRAFT, files=False):
            speculator.concerns(SamplingParams())
        lives = self.lives()
        for life in lives[:1] if "device" in self.capabilities else lives:
            while not life.done:
                step(speculator, [life], [MOST], watched)

    def test_work_does_not_grow_with_the_text(self) -> None:
        """How many steps of Python `propose` and `learn` take, after some calls, and how much memory. What a library
        does at once is not counted.
        """
        if "device" in self.capabilities:
            pytest.skip("see test_work_on_the_device_does_not_grow_with_the_text")
        shortest, *longer = LENGTHS
        short, short_bytes = self._cost_of_steps(shortest)
        most = 3 * short + SLACK_STEPS
        for length in longer:
            long, long_bytes = self._cost_of_steps(length, most)
            assert long <= most, (
                f"{short} steps of Python at {shortest:,} tokens, more than {most} at {length:,}: {_RESCAN}"
            )
            assert long_bytes <= 3 * short_bytes + SLACK_BYTES, (
                f"a step takes {short_bytes:,} bytes of memory at {shortest:,} tokens, {long_bytes:,} at {length:,}: "
                f"it copies the text, or builds something as large. {_RESCAN}"
            )

    def test_work_on_a_long_prompt_is_bounded(self) -> None:
        """Also of the first call that sees a request: the largest number of steps of Python that a call takes."""
        if "device" in self.capabilities:
            pytest.skip("prompts come to `observe` as they are computed, in chunks")
        short = self._cost_of_a_prompt(PROMPTS[0], 1 << 62)
        most = 3 * short + SLACK_STEPS
        long = self._cost_of_a_prompt(PROMPTS[1], most)
        assert long <= most, (
            f"one call takes {short} steps of Python where a prompt has {PROMPTS[0]:,} tokens, and more than {most} "
            f"where it has {PROMPTS[1]:,}: {_AT_ONCE}"
        )

    def test_a_memo_may_lie_where_another_one_lay(self) -> None:
        """As happens to memory: a request whose memo has the id() of one that is gone is another request."""
        if "device" in self.capabilities:
            pytest.skip("what it keeps is by rows: see test_rows_are_used_again")
        speculator, memo = self.new(), dict[object, object]()
        for text, alone in zip(self.lives(), self.lives(), strict=True):
            text.memo, own = memo, self.new()
            while not alone.done:
                found, expected = (plain(step(one, [life], [MOST])) for one, life in ((speculator, text), (own, alone)))
                assert found == expected, _BY_ID
            memo.clear()

    def test_instances_know_nothing_of_each_other(self, tmp_path: Path) -> None:
        """Nor does one know what another one of this process has learnt before, in the same namespace. What one drafts
        that knows nothing is found out in a process of its own.
        """
        if "device" in self.capabilities:
            pytest.skip("it is given rows of its own memory")
        texts = [(((np.array(text) + 29) % VOCAB).tolist(), prompt) for text, prompt in self.texts()]
        known = tmp_path / "trees"
        work_and_die(lambda: known.write_text(json.dumps(self._drafts(texts))))
        expected = json.loads(known.read_text())
        self._drafts(texts)
        found = json.loads(json.dumps(self._drafts(texts)))
        assert found == expected, _INSTANCES

    def _drafts(self, texts: Sequence[tuple[list[int], int]]) -> list[list[PlainTree]]:
        """Return what a new instance drafts for each step of these texts."""
        speculator, found = self.new(), []
        for text, prompt in texts:
            life = Life(text, prompt, "tenant")
            while not life.done:
                found.append(plain(step(speculator, [life], [MOST])))
        return found

    def test_requests_are_let_go(self) -> None:
        """Many come and go, each in a namespace of its own: what is kept of them ends somewhere."""
        if "device" in self.capabilities:
            pytest.skip("what it keeps is by rows, which are used again")
        speculator, numbers, text = self.new(), itertools.count(), np.array(self.texts()[0][0])

        def work() -> None:
            for number in itertools.islice(numbers, MANY):
                life = Life(((text + number) % VOCAB).tolist(), len(text) // 2, f"tenant {number}")
                for _ in range(3):
                    step(speculator, [life], [MOST])

        grown = growth(work, KEPT_BYTES * MANY, with_class(speculator), speculator.ctx, speculator.options)
        assert grown <= KEPT_BYTES * MANY, f"{grown:,} bytes more are kept after each {MANY} requests: {_KEPT}"

    def _cost_of_steps(self, length: int, most: int = 1 << 62) -> tuple[int, int]:
        """Return the medians of steps of Python, no more than `most`, and of bytes that a step takes on a text of this
        length.
        """
        speculator, found = self.new(), []
        life = _repeating(length)
        for _ in range(24):
            step(speculator, [life], [MOST])
        for _ in range(20):
            steps, memory = step_counter(most), _Memory()
            with contextlib.suppress(TooManySteps):
                step(speculator, [life], [MOST], steps.counted)
            step(speculator, [life], [MOST], memory.measured)
            found.append((steps.count, memory.peak))
        counts, peaks = zip(*found, strict=True)
        return int(np.median(counts)), int(np.median(peaks))

    def _cost_of_a_prompt(self, length: int, most: int) -> int:
        """Return the steps of Python of the call that takes most of them, of the first calls; no more than these."""
        speculator, life = self.new(), _repeating(length)
        worst = 0
        for _ in range(12):
            steps = step_counter(most)
            with contextlib.suppress(TooManySteps):
                step(speculator, [life], [MOST], steps.counted)
            worst = max(worst, steps.count)
            if worst > most:
                break
        return worst


def _repeating(length: int) -> Life:
    """Return a request whose prompt repeats itself, and whose output does so, too."""
    period = np.random.default_rng(length).integers(0, VOCAB, 101)
    return Life(np.resize(period, length + 100 * MOST).tolist(), length)


class _Memory:
    """The most bytes that are taken at once, beyond what is there before."""

    peak = 0

    @contextlib.contextmanager
    def measured(self, call: str) -> Iterator[None]:
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            yield
            self.peak = max(self.peak, tracemalloc.get_traced_memory()[1] - before)
        finally:
            tracemalloc.stop()


_NO_DRAFT = "answer at once, where need be with a tree of one node, without drafts"
_RESCAN = (
    "it goes through the whole text at each step. Keep what is known of it in DraftRow.memo, under the speculator "
    "itself as the key, and add what is new"
)
_AT_ONCE = "take on so many tokens per call at most, and draft nothing until all are known"
_BY_ID = (
    "something of a request that is gone is kept under the id() of its memo, or outside of it: keep all that is known "
    "of a request in DraftRow.memo, under the speculator itself as the key"
)
_INSTANCES = (
    "what another instance of the class has learnt shows in its drafts: keep nothing in the class or the module, nor "
    "in a default that instances share"
)
_KEPT = (
    "keep what is known of a request in DraftRow.memo, which goes with it, and bound what is learnt from many. If the "
    "bound is large, let `options` of the test class make it small"
)
