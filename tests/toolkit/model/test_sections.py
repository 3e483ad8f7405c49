"""How layers are divided into sections, and what sections send each other."""

from __future__ import annotations

from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pegboard.conformance.rig.ranks import on_sections
from pegboard.core.interfaces.errors import ModelError
from pegboard.toolkit.model.ranks import Ranks
from pegboard.toolkit.model.sections import Sections, divided, wanted_rows

HIDDEN = 3


def batch_of(logits: list[int] | None, logprobs: list[int] | None, hidden: list[int] | None) -> Any:
    """What a batch wants of a pass, and nothing else."""
    rows = [None if found is None else torch.tensor(found, dtype=torch.int64) for found in (logits, logprobs, hidden)]
    return SimpleNamespace(logits_indices=rows[0], logprob_rows=rows[1], hidden_rows=rows[2])


@pytest.mark.parametrize(
    ("layers", "ends", "count", "expected"),
    [
        ([1] * 8, 0, 2, [4, 4]),
        ([1] * 7, 0, 3, [3, 2, 2]),
        ([1] * 8, 4, 2, [2, 6]),
        ([1] * 8, 100, 3, [1, 4, 3]),
        ([9, 1, 1, 1, 1, 1], 0, 2, [1, 5]),
        ([5], 3, 1, [1]),
    ],
)
def test_layers_are_divided_by_bytes(layers: list[int], ends: int, count: int, expected: list[int]) -> None:
    assert divided(layers, ends, count) == expected


def test_no_other_division_is_more_even() -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(40):
        total = int(torch.randint(2, 8, (), generator=draw))
        layers = torch.randint(1, 20, (total,), generator=draw).tolist()
        ends, count = (
            int(torch.randint(0, 40, (), generator=draw)),
            int(torch.randint(1, total + 1, (), generator=draw)),
        )

        def squares(cuts: tuple[int, ...], layers: list[int] = layers, ends: int = ends) -> int:
            edges = [0, *cuts, len(layers)]
            sums = [sum(layers[start:stop]) for start, stop in pairwise(edges)]
            return sum(size**2 for size in (sums[0] + ends, *sums[1:]))

        counts = divided(layers, ends, count)
        own = tuple(sum(counts[:stop]) for stop in range(1, count))
        assert sum(counts) == total
        assert squares(own) == min(squares(cuts) for cuts in combinations(range(1, total), count - 1))


def test_sections_have_all_layers() -> None:
    found = [Sections(3, index).own([1] * 7, 0) for index in range(3)]
    assert [(one.start, one.stop) for one in found] == [(0, 3), (3, 5), (5, 7)]
    assert Sections(2, 1, [1, 6]).own([1] * 7, 100) == range(1, 7)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (Sections(4), "3 layers do not make 4 sections; it may be at most 3"),
        (Sections(2, layers=[1, 1]), r"\[1, 1\], but 3 layers are to be divided among 2 sections"),
        (Sections(2, layers=[0, 3]), "at least one for each"),
        (Sections(2, layers=[3]), "3 layers are to be divided among 2 sections"),
    ],
)
def test_what_cannot_be_divided(sections: Sections, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        sections.own([1, 1, 1], 0)


@pytest.mark.parametrize(
    ("wanted", "rows"), [((None, None, None), None), (([], None, None), []), (([1, 4], [2], [4]), [1, 4, 2, 4])]
)
def test_wanted_rows(wanted: tuple[list[int] | None, ...], rows: list[int] | None) -> None:
    found = wanted_rows(batch_of(*wanted))
    assert rows == (None if found is None else found.tolist())


@pytest.mark.parametrize(
    ("wanted", "rows"), [((None, None, None), range(5)), (([], None, None), []), (([1], [2], [4]), [1, 2, 4])]
)
def test_states_go_through_all_sections_and_back(wanted: tuple[list[int] | None, ...], rows: list[int]) -> None:
    """Each adds its number; the first one gets the rows that the batch wants, and waits for nothing else."""

    def computes(ranks: Ranks) -> torch.Tensor:
        sections = ranks.sections
        states = torch.arange(5.0)[:, None].expand(5, HIDDEN) if sections.first else torch.empty(5, HIDDEN)
        states = states if sections.first else sections.receive(states)
        return sections.hand_on(states + sections.index + 1, batch_of(*wanted))

    first, *_ = on_sections(3, computes)
    expected = torch.zeros(5, HIDDEN)
    for row in rows:
        expected[row] = row + 6
    assert torch.equal(first, expected)


def test_one_section_sends_nothing() -> None:
    states = torch.ones(2, HIDDEN)
    assert Sections().hand_on(states, batch_of([0], None, None)) is states
    with pytest.raises(RuntimeError, match="section 1 of 2 is not connected to the others"):
        Sections(2, 1).receive(states)
