"""A CPU's graphs do what a device's do: the same operators on the same memory, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
import torch

from pegboard.conformance.rig.tape import TapeCapture
from pegboard.toolkit.graph_trial import LooksAtData
from pegboard.toolkit.kernels.launch import Grid, launch

if TYPE_CHECKING:
    from pegboard.toolkit.kernels.launch import Kernel

X = torch.tensor([3.0, -1.0, 0.0, 2.0])

RUNS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "views": lambda x: x.view(2, 2).t().flatten()[1:],
    "a view, then out of place": lambda x: x.view(2, 2).t().contiguous().view(-1) + 1,
    "composed": lambda x: torch.nn.functional.linear(x.view(2, 2), x.reshape(2, 2), x[:2]),
    "in place": lambda x: torch.zeros(4).add_(x).mul_(2).relu_(),
    "in place of a part": lambda x: _filled(torch.ones(2, 4), lambda made: made[1, 1:].copy_(x[1:])),
    "out": lambda x: torch.add(x, 1, out=torch.empty(4)),
    "index": lambda x: x[x.argsort()],
    "index put": lambda x: _filled(torch.zeros(4), lambda made: made.index_put_((x.argsort(),), x)),
    "a mask that is filled": lambda x: _filled(x.clone(), lambda made: made.__setitem__(x > 0, 5.0)),
    "gather": lambda x: x.gather(0, x.argsort()),
    "matmul": lambda x: x.view(2, 2) @ x.view(2, 2).t(),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x.view(2, 2), x.view(2, 2)),
    "several results": lambda x: torch.cat(x.sort(descending=True)),
    "chunks": lambda x: torch.cat([one * place for place, one in enumerate(x.chunk(2))]),
    "softmax": lambda x: x.softmax(0),
    "types": lambda x: x.to(torch.int64).double(),
    "lists": lambda x: torch.stack([x[:2], x[2:] + 1], dim=1),
    "made inside": lambda x: torch.arange(4) + x + torch.full((4,), 2.0),
    "repeated a known number of times": lambda x: x.repeat_interleave(2),
    "a whole layer": lambda x: torch.nn.functional.layer_norm(x.view(2, 2), (2,)),
}

LOOKS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool(x[0] > 0),
    "list": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "array": lambda x: np.asarray(x),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "put at a mask": lambda x: x.clone().index_put_((x > 0,), torch.zeros(2)),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "repeated as data says": lambda x: x.repeat_interleave(x.long().clamp(0)),
    "of numbers": lambda x: torch.tensor([1, 2]),
    "of an array": lambda x: torch.from_numpy(np.ones(4)),
}


def _filled(made: torch.Tensor, fill: Callable[[torch.Tensor], object]) -> torch.Tensor:
    fill(made)
    return made


@pytest.fixture(autouse=True, params=[True, False], ids=["inference", "no_grad"])
def mode(request: pytest.FixtureRequest) -> object:
    with torch.inference_mode(request.param), torch.no_grad():
        yield


@pytest.mark.parametrize("name", RUNS)
def test_a_replay_computes_from_what_is_there_now(name: str) -> None:
    x = torch.zeros(4)
    replay, found = TapeCapture().capture(lambda: RUNS[name](x))
    for numbers in (X, X.flip(0) * 2, torch.zeros(4), X):
        x.copy_(numbers)
        replay()
        torch.testing.assert_close(found, RUNS[name](numbers.clone()), equal_nan=True)


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_at_data_is_refused(name: str) -> None:
    x = X.clone()
    LOOKS[name](x)
    TapeCapture().warm(lambda: LOOKS[name](x))
    with pytest.raises(LooksAtData):
        TapeCapture().capture(lambda: LOOKS[name](x))
    bool(x[0] > 0)  # allowed again


def test_what_is_new_is_not_seen() -> None:
    """A tensor in another's place, a scalar that changes, a decision: all are as they were."""
    tensors, factors, calls = [X.clone()], [2.0], []

    def run() -> torch.Tensor:
        calls.append(1)
        return tensors[-1] * factors[-1] if factors[-1] != 3.0 else tensors[-1] - 1

    replay, found = TapeCapture().capture(run)
    kept = tensors[-1]
    tensors.append(torch.full((4,), 100.0))
    factors.append(3.0)
    replay()
    torch.testing.assert_close(found, X * 2)
    kept.add_(1)
    replay()
    torch.testing.assert_close(found, (X + 1) * 2)
    assert len(calls) == 1, "a replay runs no Python of the model"


def test_memory_outside_is_written_again() -> None:
    """As keys and values are."""
    pool, slots, x = torch.zeros(6), torch.tensor([1, 3]), torch.tensor([5.0, 6.0])
    replay, _ = TapeCapture().capture(lambda: pool.index_copy_(0, slots, x * 2))
    pool.zero_()
    slots.copy_(torch.tensor([0, 5]))
    x.add_(1)
    replay()
    assert pool.tolist() == [12.0, 0.0, 0.0, 0.0, 0.0, 14.0]


def test_shapes_of_arguments_are_frozen() -> None:
    """A view that is turned round later is, in the graph, as it was."""
    x = torch.arange(4.0).view(2, 2)
    replay, found = TapeCapture().capture(lambda: x.sum(0))
    x.t_()
    replay()
    torch.testing.assert_close(found, torch.tensor([2.0, 4.0]))


def test_graphs_share_their_memory() -> None:
    """A capture computes nothing that may be used, and another graph's replay overwrites what one has left."""
    capture, x = TapeCapture(), X.clone()
    first, one = capture.capture(lambda: x + 1)
    assert bool(one.isnan().all()), "what was recorded has not run yet"
    second, two = capture.capture(lambda: x + 2)
    first()
    first()
    torch.testing.assert_close(one, X + 1)
    second()
    assert bool(one.isnan().all())
    torch.testing.assert_close(two, X + 2)
    assert (capture.captured, capture.replayed) == (2, 3)


def test_memory_is_counted_and_limited() -> None:
    capture = TapeCapture(limit=100)
    kept = capture.capture(lambda: torch.zeros(8) + 1)
    assert capture.memory() == 64
    with pytest.raises(torch.OutOfMemoryError):
        capture.capture(lambda: torch.zeros(10))
    assert capture.memory() == 64
    del kept
    assert capture.memory() == 0


class Doubling:
    """A kernel that writes twice its first argument plus a number to its second one, with a loop as an interpreter
    has it: it looks at the data.
    """

    launched = 0

    def __getitem__(self, grid: Grid) -> Callable[..., object]:
        def run(source: torch.Tensor, out: torch.Tensor, plus: float, *, block: int) -> None:
            Doubling.launched += 1
            for place in range(min(grid[0] * block, len(source))):
                out[place] = 2 * source[place].item() + plus

        return run


def test_launches_are_part_of_graphs() -> None:
    """With their grid, their memory and their scalars; what goes on inside is the kernel's own."""
    x, kernel, plus = X.clone(), Doubling(), [1.0]

    def run() -> torch.Tensor:
        out = torch.empty_like(x)
        launch(cast("Kernel", kernel), (2,), x * 1, out, plus[0], block=2)
        return out + 1

    before = Doubling.launched
    replay, found = TapeCapture().capture(run)
    plus[0] = 50.0
    x.neg_()
    replay()
    torch.testing.assert_close(found, -2 * X + 2)
    assert Doubling.launched == before + 2


def test_an_error_while_recording_leaves_nothing_behind() -> None:
    capture = TapeCapture()
    with pytest.raises(ZeroDivisionError):
        capture.capture(lambda: X + 1 / 0)
    assert capture.memory() == 0
    assert X.tolist() == [3.0, -1.0, 0.0, 2.0]
