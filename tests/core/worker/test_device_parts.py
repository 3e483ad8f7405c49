"""Device parts: whose answers count, and what they are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pegboard.core.interfaces.ahead import Verified, Wants
from pegboard.core.interfaces.errors import BadAnswer
from pegboard.core.interfaces.forward import ForwardOutput, Taps
from pegboard.core.interfaces.stage import DevicePart
from pegboard.core.interfaces.trees import Accepted
from pegboard.core.worker.device_parts import DeviceParts
from pegboard.toolkit.sampling import tree

TREES = tree.chains([(1, [2, 3])])
DRAWN = np.array([2, 9, 9])


class Reads(DevicePart):
    def __init__(self, name: str, wants: Wants, accepts: Accepted | None = None) -> None:
        self.name, self._wants, self._accepts = name, wants, accepts

    def wants(self, payload: object) -> Wants:
        assert payload == self.name
        return self._wants

    def accept(self, payload: object, verified: Verified) -> Accepted | None:
        assert payload == self.name
        return self._accepts


def work(*names: str) -> Any:
    return SimpleNamespace(payloads={name: name for name in names}, trees=TREES)


def accepted(*tokens: int) -> Accepted:
    return Accepted(np.array([len(tokens)]), np.arange(len(tokens)), np.array(tokens))


def verified() -> Verified:
    return Verified(TREES, np.array([1]), DRAWN, torch.zeros(3, 10), None)


def test_a_pass_has_what_all_want() -> None:
    parts = DeviceParts([Reads("a", Wants(states=(3, 1))), Reads("b", Wants(logits=True, states=(1, 0)))])
    assert parts.wants(work("a", "b")) == Wants(logits=True, states=(3, 1, 0))
    assert parts.wants(work("a")) == Wants(states=(3, 1)), "a part without a payload wants something"
    assert DeviceParts([DevicePart()]).wants(work()) == Wants()


def test_each_reads_the_states_that_it_wants() -> None:
    taps = Taps((3, 1, 0))
    for place in taps.places:
        taps.note(place, torch.full((2, 1), float(place)))
    assert taps.joined((1, 0)).tolist() == [[1.0, 0.0]] * 2
    assert taps.joined().tolist() == [[3.0, 1.0, 0.0]] * 2


def test_the_first_answer_counts() -> None:
    parts = [Reads("a", Wants()), Reads("b", Wants(), accepted(2, 3, 7)), Reads("c", Wants(), accepted(5))]
    output = ForwardOutput(torch.from_numpy(DRAWN))
    for asked, tokens in ((("a", "b", "c"), [2, 3, 7]), (("c",), [5]), (("a",), [2, 9])):
        assert DeviceParts(parts).accept(work(*asked), verified(), output).tokens.tolist() == tokens


def test_what_is_no_path_fails_with_its_name() -> None:
    liar = Reads("a", Wants(), accepted(3, 7))
    with pytest.raises(BadAnswer, match="not that of the next node") as caught:
        DeviceParts([liar]).accept(work("a"), verified(), ForwardOutput(torch.from_numpy(DRAWN)))
    assert caught.value.by is liar
