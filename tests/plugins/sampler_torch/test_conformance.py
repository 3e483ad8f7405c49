"""The suite of Sampler on the torch sampler."""

from __future__ import annotations

from pegboard.conformance.sampler import SamplerContract


class TestTorch(SamplerContract):
    provider = "torch"
