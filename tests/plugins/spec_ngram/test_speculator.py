"""What the n-gram speculator proposes, when it pauses, and what requests learn from each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pegboard.core.interfaces.layers import ModelSpec
from pegboard.plugins.spec_ngram import index, speculator
from pegboard.plugins.spec_ngram.options import NgramOptions
from pegboard.plugins.spec_ngram.speculator import NgramSpeculator
from pegboard.plugins.speculation.api import DraftRow, SpeculatorContext
from pegboard.plugins.speculation.suite import Life, step
from pegboard.plugins.speculation.suite.checks import plain

VOCAB = 97


def make(**options: Any) -> NgramSpeculator:
    ctx = SpeculatorContext(ModelSpec("toy", VOCAB, 8, 4096, (), ()), 16)
    return NgramSpeculator(NgramOptions(**options), ctx)


def drafted(tokens: list[int], most: int = 6, **options: Any) -> list[int]:
    row = DraftRow(np.array(tokens, np.int64), len(tokens), "", most, {})
    return make(**options).propose([row]).tokens[1:].tolist()


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2], [3, 4, 5, 6, 7]),
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [4, 9, 1, 2, 4]),  # the newest, and beyond the end it follows itself
        ([9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2], [3, 8, 1, 2, 4]),  # the longest before the newest
        ([5, 5, 5], [5, 5, 5, 5, 5]),
        ([1, 2, 3, 4], []),
        ([1], []),
        ([2, 1, 3, 1], []),  # one token is no match
    ],
)
def test_what_followed_is_proposed(tokens: list[int], expected: list[int]) -> None:
    assert drafted(tokens) == expected


def test_shortest_and_longest_matches_are_options() -> None:
    assert drafted([2, 1, 3, 1], min_match=1) == [3, 1, 3, 1, 3]
    assert drafted([9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2], max_match=2) == [4, 9, 1, 2, 4]
    assert drafted([1, 2, 3, 1, 2], min_match=3) == []
    with pytest.raises(ValueError, match="min_match 5 is larger than max_match 4"):
        NgramOptions(min_match=5, max_match=4)


def test_no_more_than_the_core_allows() -> None:
    assert len(drafted([1, 2, 3] * 9, most=64)) == 15


def test_prompts_with_hashes_of_media_are_drafted_up_to_them() -> None:
    assert drafted([1, 2, 3, 10**15, 4, 1, 2]) == [3]
    assert drafted([1, 2, VOCAB, 4, 1, 2]) == []


def asked_at(life: Life, found: NgramSpeculator, steps: int) -> list[int]:
    """At which lengths the text is looked at, while nothing that is drafted is right."""
    lengths: list[int] = []
    original = index.NgramIndex.find

    def find(own: index.NgramIndex, tokens: NDArray[np.int64]) -> int | None:
        lengths.append(len(tokens))
        return original(own, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index.NgramIndex, "find", find)
        for _ in range(steps):
            step(found, [life], [8])
    return lengths


def test_it_pauses_where_nothing_matches() -> None:
    life = Life(range(97), 3)
    assert asked_at(life, make(longest_pause=64), 90) == [3, 5, 9, 17, 33, 65]
    life = Life(range(97), 3)
    assert asked_at(life, make(longest_pause=8), 40) == [3, 5, 9, 17, 25, 33, 41]
    life = Life(range(97), 3)
    assert asked_at(life, make(), 40) == [*range(3, 43)]


def test_it_pauses_where_drafts_are_rejected_until_one_is_not() -> None:
    # After 1 comes another token each time; at the end the text repeats itself.
    text = [token for number in range(2, 90) for token in (0, 1, number)] + [*range(50, 70)] * 6
    found, life = make(longest_pause=64), Life(text, 5)
    lengths = []
    while not life.done:
        before = life.length
        if step(found, [life], [8]).counts[0] > 1:
            lengths.append((before, life.length - before))
    wrong = [length for length, gained in lengths if gained == 1]
    assert len(wrong) < 20, "it goes on drafting what is rejected"
    ends = [gained for length, gained in lengths if length > 3 * 88 + 20 + 32]
    assert len(ends) >= 5, "it does not come back"
    assert min(ends[:-1]) == 8, "a success ends the pause"


def test_a_long_prompt_is_drafted_for_when_it_is_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "BLOCK", 16)
    monkeypatch.setattr(index, "AT_ONCE", 64)
    life = Life([*range(50)] * 8, 200)
    found = make()
    counts = [int(step(found, [life], [8]).counts[0]) for _ in range(6)]
    assert counts == [1, 1, 1, 8, 8, 8]


# ---- Outputs of other requests --------------------------------------------------------------------------------------

SAID = [int(token) for token in np.random.default_rng(5).permutation(VOCAB)]


def say(found: NgramSpeculator, namespace: str, text: list[int] = SAID, prompt: int = 10) -> int:
    """How many passes a request takes that says this."""
    life, passes = Life(text, prompt, namespace), 0
    while not life.done:
        step(found, [life], [8])
        passes += 1
    return passes


def test_requests_learn_from_each_other_where_they_may() -> None:
    alone, shared = make(), make(shared=True)
    first = say(shared, "alice")
    assert first == say(alone, "alice") == say(alone, "alice") == 87
    assert say(shared, "alice") < 40
    assert say(shared, "bob") == first, "what others have said shows"


def test_prompts_are_not_shared() -> None:
    found = make(shared=True)
    say(found, "alice", prompt=90)
    assert say(found, "alice", prompt=10) > 80


@pytest.mark.parametrize("capacity", [1, 2, 5, 40])
def test_what_is_shared_is_bounded(capacity: int) -> None:
    """One token adds seven nodes, more than there may be."""
    found = make(shared=True, capacity=capacity)
    for _ in range(3):
        say(found, "alice")
        assert found.shared is not None
        assert len(found.shared) == capacity


def test_what_was_not_used_for_longest_goes() -> None:
    found = make(shared=True, capacity=700)
    other = SAID[::-1]
    for _ in range(4):
        say(found, "alice")
    say(found, "alice", other)
    assert say(found, "alice") > 40, "both do not fit"
    roomy = make(shared=True, capacity=5000)
    for text in (SAID, other, SAID):
        last = say(roomy, "alice", text)
    assert last < 40


def test_sharing_is_bounded_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculator, "SHARED_AT_ONCE", 5)
    found, life = make(shared=True), Life(SAID, 10)
    life.length = 40
    sizes = []
    for _ in range(8):
        found.propose([life.row()])
        assert found.shared is not None
        sizes.append(len(found.shared))
    assert max(np.diff(sizes)) <= 5 * 7
    assert sizes[-1] == sizes[-3]


def test_the_own_text_comes_first() -> None:
    found = make(shared=True)
    say(found, "alice", [0, 1, 2, 3, 4, 5], 1)
    life = Life([0, 1, 7, 8, 0, 1], 6, "alice")
    assert plain(found.propose([life.row(4)])) == [([1, 7, 8, 0], [-1, 0, 1, 2])]


@pytest.mark.parametrize("name", ["accept_threshold_single", "accept_threshold_acc"])
def test_a_threshold_needs_its_way_of_accepting(name: str) -> None:
    """Without, it would have no effect, and nothing would say so."""
    half: dict[str, Any] = {name: 0.5}
    with pytest.raises(ValueError, match="need accept: thresholds"):
        NgramOptions(**half)
    with pytest.raises(ValueError, match="less than or equal to 1"):
        NgramOptions(accept="thresholds", **half | {name: 1.5})
    declared = frozenset({"judges"})
    assert NgramOptions(accept="thresholds", **half).provides(declared) == declared
    assert NgramOptions().provides(declared) == frozenset()
