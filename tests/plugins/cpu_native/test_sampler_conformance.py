"""The suite of Sampler on the native sampler. tests/numeric.py has the instruction sets."""

from __future__ import annotations

import pytest

import tests.plugins.cpu_native.instruction_sets  # noqa: F401  skips where nothing can be compiled
from pegboard.conformance.sampler import SamplerContract


class TestBest(SamplerContract):
    provider = "cpu_native"
    options = {"threads": 2}


@pytest.mark.full
class TestOneThread(SamplerContract):
    provider = "cpu_native"
    options = {"threads": 1}
