"""The suite of Sampler on the native sampler, with every instruction set of this CPU."""

from __future__ import annotations

import pytest

from pegboard.conformance.sampler import SamplerContract
from tests.plugins.cpu_native.instruction_sets import SETS


class TestBest(SamplerContract):
    provider = "cpu_native"
    options = {"threads": 2}


@pytest.mark.full
class TestOneThread(SamplerContract):
    provider = "cpu_native"
    options = {"threads": 1}


@pytest.mark.full
@pytest.mark.skipif("avx512" not in SETS, reason="this CPU has no AVX-512 bf16")
class TestAvx512(SamplerContract):
    provider = "cpu_native"
    options = {"instructions": "avx512", "threads": 3}


@pytest.mark.skipif("avx2" not in SETS, reason="this CPU has no AVX2")
class TestAvx2(SamplerContract):
    provider = "cpu_native"
    options = {"instructions": "avx2", "threads": 2}
