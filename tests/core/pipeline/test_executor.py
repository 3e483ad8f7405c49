"""The executor of this process: one thing after the other, in launch order, and errors where results are taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pegboard.core.interfaces.batch import StageWork
from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.pipeline.executor import Done, LocalExecutor

BOTH = pytest.mark.parametrize("thread", [False, True])


class Calls:
    """What runs batches and a stage's work; notes the order."""

    def __init__(self, thread: bool) -> None:
        self.seen: list[Any] = []
        self.executor = LocalExecutor(self.launch, stages={"adds": self.add}, thread=thread)

    def launch(self, work: Any) -> Done[BatchResult]:
        self.seen.append(work)
        if work == "bad":
            raise RuntimeError("not launched")
        return Done(BatchResult(np.zeros(len(work), np.int64)))

    def add(self, numbers: list[int]) -> Done[int]:
        self.seen.append(numbers)
        return Done(sum(numbers))


@BOTH
def test_all_runs_in_launch_order(thread: bool) -> None:
    calls = Calls(thread)
    first: Any = "abc"
    last: Any = "de"
    pending = [calls.executor.submit(one) for one in (first, StageWork("adds", [1, 2]), last)]
    assert calls.executor.ask("adds", [3, 4]) == 7
    assert calls.seen == ["abc", [1, 2], "de", [3, 4]]
    found = [one.result() for one in pending]
    assert isinstance(found[0], BatchResult)
    assert found[1] == 3
    calls.executor.close()


@BOTH
def test_errors_come_with_results(thread: bool) -> None:
    calls = Calls(thread)
    bad: Any = "bad"
    one, other = calls.executor.submit(bad), calls.executor.submit(StageWork("nobody's", None))
    with pytest.raises(RuntimeError, match="not launched"):
        one.result()
    with pytest.raises(RuntimeError, match='no part of the stage "nobody\'s"'):
        other.result()
    with pytest.raises(RuntimeError, match="not launched"):
        calls.executor.rerun(bad)
    with pytest.raises(TypeError):
        calls.executor.ask("adds", None)
    calls.executor.close()
