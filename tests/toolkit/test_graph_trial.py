"""What keeps a computation from being a graph: `tests/conformance/test_tape.py` has most looks at data."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from pegboard.toolkit.graph_trial import LooksAtData, Recording, first_difference, operations_of
from pegboard.toolkit.kernels.launch import launch

X = torch.arange(6.0)
FEWER = torch.arange(3.0)


class Kernel:
    """Doubles what it is given, with operators that are not the computation's."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return lambda x, **_: x.copy_(torch.tensor([float(one) * 2 for one in x.tolist()]))


def steps(run: Callable[[], object]) -> list[str]:
    return [name for name, _, _ in operations_of(run)]


def test_operators_and_launches_are_noted() -> None:
    x = X.clone()

    def run() -> None:
        launch(Kernel(), (2, 1), x + 1.0, BLOCK=4)

    first, second = operations_of(run)
    assert first[0] == "aten.add.Tensor"
    assert second[0].endswith("(2, 1)")
    assert second[1:] == ((((6,), torch.float32, (1,)),), {"BLOCK": 4})


@pytest.mark.parametrize(
    "run",
    [
        lambda: X.tolist(),
        lambda: float(X.sum()),
        lambda: X[X > 2],
        lambda: X.to("meta"),
        lambda: torch.empty(6, device="meta").copy_(X),
        lambda: torch.tensor([1.0, 2.0]) + 1,
    ],
    ids=["list", "number", "mask", "to another device", "copy to another device", "made of a list"],
)
def test_looks_at_data(run: Callable[[], object]) -> None:
    run()
    with pytest.raises(LooksAtData):
        operations_of(run)


def test_numbers_of_the_host_may_be_used() -> None:
    """A single one goes with the launch."""
    assert steps(lambda: X * torch.tensor(2.0))
    assert steps(lambda: torch.empty(6, device="meta") * torch.tensor(2.0))


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (lambda: X + 1, lambda: X + 1, None),
        (lambda: X + 1, lambda: FEWER + 1, "operation 0 is aten.add.Tensor with other shapes or numbers"),
        (lambda: X + 1, lambda: X + 2, "operation 0 is aten.add.Tensor with other shapes or numbers"),
        (lambda: X + 1, lambda: X - 1, "operation 0 is aten.add.Tensor and then aten.sub.Tensor"),
        (lambda: X + 1, lambda: (X + 1) * 2, "operation 1 is nothing and then aten.mul.Tensor"),
    ],
)
def test_differences(first: Callable[[], object], second: Callable[[], object], words: str | None) -> None:
    found = first_difference(operations_of(first), operations_of(second))
    if words is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(words, found), found


def test_what_happens_in_a_pause_is_not_noted() -> None:
    recording = Recording(strict=True)
    with recording:
        X + 1
        with recording.pause():
            X * 2
    assert [name for name, _, _ in recording.steps] == ["aten.add.Tensor"]
