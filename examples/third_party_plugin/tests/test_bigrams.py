"""What is drafted, and how much of it."""

import numpy as np
import pytest
from pegboard.core.interfaces import ModelSpec
from pegboard.plugins.speculation.api import DraftRow, SpeculatorContext

from pegboard_example_plugin.bigrams import Bigrams
from pegboard_example_plugin.options import BigramsOptions


@pytest.mark.parametrize(
    ("tokens", "most", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 8, [3, 4, 1]),
        ([1, 2, 3, 1, 2, 5, 1, 2], 3, [5, 1]),
        ([1, 2, 3, 4, 1, 2], 1, []),
        ([1, 2, 3], 8, []),
        ([1, 2, 99, 1, 2], 8, []),
        ([7], 8, []),
    ],
)
def test_what_followed_last_is_drafted(tokens: list[int], most: int, expected: list[int]) -> None:
    speculator = Bigrams(BigramsOptions(nodes=4), SpeculatorContext(ModelSpec("toy", 10, 8, 64, (), ()), 8))
    memo: dict[object, object] = {}
    for length in range(1, len(tokens) + 1):
        trees = speculator.propose([DraftRow(np.array(tokens[:length]), 1, "", most, memo)])
    assert trees.tokens.tolist() == [tokens[-1], *expected]
