"""The suite of Sampler on the Triton sampler."""

from __future__ import annotations

import pytest

from pegboard.conformance.sampler import SamplerContract

# As it should: what is that far behind is not drawn. Only the interpreter, which is numpy, mentions it.
OVERFLOWS = pytest.mark.filterwarnings("ignore:.*overflow encountered in (subtract|multiply)")


@OVERFLOWS
class TestTriton(SamplerContract):
    """That it draws what the sampler `torch` draws is seen by test_sampler.py, so fewer draws will do."""

    provider = "triton"
    options = {"block": 1024}
    draws = 1000


@OVERFLOWS
@pytest.mark.full
class TestTritonInSmallTiles(SamplerContract):
    """Several programs, and several tiles for a row."""

    provider = "triton"
    draws = 500
    options = {"rows": 32, "block": 16}
