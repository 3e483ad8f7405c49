"""How many drafts are asked for, in a time of its own."""

from __future__ import annotations

import random

import pytest

from pegboard.core.interfaces.stage import StepResult, StepView
from pegboard.plugins.speculation.messages import NAME
from pegboard.plugins.speculation.worth import MEASURE_AGAIN, PLAIN_STEPS, Acceptance, StepTimes, worthwhile
from tests.core.pipeline.harness import Harness, Seer, prompts


def best(chances: list[list[float]], plain: float, drafts: tuple[float, float]) -> float:
    """The most tokens per second that any choice of drafts brings."""
    found = 0.0
    options: list[list[int]] = [[]]
    for one in chances:
        options = [[*before, count] for before in options for count in range(len(one) + 1)]
    for counts in options:
        tokens = len(chances) + sum(sum(one[:count]) for one, count in zip(chances, counts, strict=True))
        found = max(found, tokens / (plain + drafts[0] * any(counts) + drafts[1] * sum(counts)))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_what_is_chosen_is_best(seed: int) -> None:
    rng = random.Random(seed)
    chances = []
    for _ in range(rng.randint(1, 3)):
        chance, one = 1.0, []
        for _ in range(4):
            chance *= rng.random() ** rng.choice([0.2, 1])
            one.append(chance)
        chances.append(one)
    drafts = rng.choice([0.0, 0.2, 0.5]), rng.choice([0.05, 0.3, 1.0])
    counts = worthwhile(chances, [4] * len(chances), 1.0, drafts)
    tokens = len(chances) + sum(sum(one[:count]) for one, count in zip(chances, counts, strict=True))
    seconds = 1 + drafts[0] * any(counts) + drafts[1] * sum(counts)
    assert tokens / seconds == pytest.approx(best(chances, 1.0, drafts))


def test_bounds_are_kept() -> None:
    assert worthwhile([[0.9, 0.8], [0.9, 0.8]], [0, 1], 1.0, (0.0, 0.0)) == [0, 1]


def test_acceptance_follows_what_happens() -> None:
    acceptance = Acceptance(7)
    for _ in range(60):
        acceptance.chances()
        acceptance.note(7, 2)
    first, second, third, *_ = acceptance.chances()
    assert first > second > 0.8
    assert third < 0.2
    for _ in range(60):
        acceptance.chances()
        acceptance.note(7, 7)
    assert acceptance.chances()[6] > 0.6


def test_an_old_failure_is_forgiven() -> None:
    acceptance = Acceptance(3)
    for _ in range(20):
        acceptance.note(3, 0)
    low = acceptance.chances()[0]
    for _ in range(100):
        acceptance.chances()
    assert acceptance.chances()[0] > low + 0.3


def test_times_are_measured_first_and_now_and_then_again() -> None:
    times = StepTimes()
    assert times.plain(1) is None
    for _ in range(PLAIN_STEPS):
        times.note(1, 0, 0.01)
    assert times.plain(1) == pytest.approx(0.01)
    assert times.drafts(1) == pytest.approx((0.0, 0.003))  # a guess
    for number in range(MEASURE_AGAIN - 1):
        times.note(1, 1 + number % 7, 0.012 + 0.0005 * (1 + number % 7))
    assert times.drafts(1) == pytest.approx((0.002, 0.0005), rel=0.2)
    assert times.plain(1) is not None
    times.note(1, 4, 0.012)
    assert times.plain(1) is None
    times.note(1, 0, 10.0)  # the machine stalled
    assert times.plain(1) == pytest.approx(0.01 + (0.02 - 0.01) / 3)


def test_what_is_known_of_a_similar_size_counts() -> None:
    times = StepTimes()
    for requests in (5, 6):
        for _ in range(PLAIN_STEPS):
            times.note(requests, 0, 0.01)
    for _ in range(30):
        times.note(5, 5, 0.02)
    assert times.drafts(6) == pytest.approx(times.drafts(5), rel=0.2)


@pytest.mark.parametrize(("node", "rate", "drafted"), [(0.0005, 0.8, True), (0.02, 0.8, False), (0.004, 0.05, False)])
def test_drafts_that_do_not_pay_stop(node: float, rate: float, drafted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are too dear, or too seldom right."""
    harness = Harness(speculator=Seer(rate), speculation={"adaptive": True})
    assert harness.speculation is not None
    nodes: list[int] = []
    commit = harness.speculation.commit

    def timed(step: StepView, result: StepResult) -> None:
        count = 0 if step.batch.trees is None else int(step.batch.trees.counts.sum()) - 1
        nodes.append(count)
        step.notes[NAME] = 0.01 + node * count
        commit(step, result)

    monkeypatch.setattr(harness.speculation, "commit", timed)
    harness.submit("r", prompts(1)[0], 600, sampling={"ignore_eos": True})
    harness.run()
    late = nodes[len(nodes) // 2 :]
    assert (sum(late) / len(late) > 1) == drafted


def test_steps_that_take_no_time_that_the_clock_shows() -> None:
    times = StepTimes()
    for _ in range(5):
        times.note(1, 0, 0.0)
    plain = times.plain(1)
    assert plain is not None
    assert len(worthwhile([[0.6]], [1], plain, times.drafts(1))) == 1
