"""What may not come next, and what a request may ask for."""

import numpy as np
import pytest
import torch
from pegboard.core.interfaces import InvalidRequest, LogitsProcessorContext, SamplingParams

from pegboard_example_plugin.no_repeat import NoRepeat, continuations
from pegboard_example_plugin.options import NoRepeatOptions


@pytest.mark.parametrize(
    ("output", "size", "expected"),
    [
        ([], 1, []),
        ([3, 1, 3], 1, [1, 3]),
        ([1, 2, 9, 1], 2, [2]),
        ([1, 2, 1, 4, 1], 2, [2, 4]),
        ([1, 2, 3, 8, 1, 2], 3, [3]),
        ([1, 2, 3, 8, 2], 3, []),
        ([1, 2], 3, []),
    ],
)
def test_continuations(output: list[int], size: int, expected: list[int]) -> None:
    assert continuations(np.array(output, dtype=np.int64), size).tolist() == expected


@pytest.mark.parametrize("said", [{}, {"size": 0}, {"size": 9}, {"size": "two"}, {"sizes": 2}], ids=str)
def test_what_makes_no_sense_is_refused_by_name(said: dict[str, object]) -> None:
    ctx = LogitsProcessorContext(100, torch.device("cpu"), frozenset({2}))
    processor = NoRepeat(NoRepeatOptions(longest=8), ctx)
    with pytest.raises(InvalidRequest) as caught:
        processor.wants(SamplingParams(extra={"no_repeat": said}))
    assert (caught.value.param or "").startswith("custom_params.no_repeat")
