"""The suite of Sampler on the Triton sampler."""

from __future__ import annotations

import pytest

from pegboard.conformance.sampler import SamplerContract

# As it should: what is that far behind is not drawn. Only the interpreter, which is numpy, mentions it.
OVERFLOWS = pytest.mark.filterwarnings("ignore:.*overflow encountered in (subtract|multiply)")


@OVERFLOWS
class TestTriton(SamplerContract):
    """Large vocabularies take several tiles and programs. That all draws are those of the sampler `torch` is seen by
    test_sampler.py, so fewer will do here.
    """

    provider = "triton"
    options = {"block": 1024}
    draws = 1000
