"""What a sampler owes that never waits for its device: the part of the suite about the capability `no_sync`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pegboard.conformance.rig.no_looks import NoLooks
from pegboard.conformance.suite import ContractSuite, capability
from pegboard.core.interfaces.sampler import Sampler, SamplerContext
from pegboard.core.interfaces.sampling import SAMPLING_ROW, LogprobRequest, SamplingBatch, SamplingParams
from pegboard.toolkit import kernels
from pegboard.toolkit.kernels.launch import observed

META = torch.device("meta")
"""Tensors without data: whatever would wait for the device fails there."""

GREEDY = SamplingParams(temperature=0.0)
BATCHES = {
    "greedy": [GREEDY] * 3,
    "sampled": [SamplingParams(), SamplingParams(temperature=0.5)],
    "filtered": [SamplingParams(top_k=5), SamplingParams(top_p=0.9), SamplingParams(min_p=0.1), GREEDY],
    "one": [SamplingParams(top_k=50, top_p=0.5, min_p=0.01)],
}


class SamplerWaiting(ContractSuite):
    """Kernels are not run here: they have to be launched through `pegboard.toolkit.kernels.launch`."""

    @capability("no_sync")
    @pytest.mark.parametrize("vocab", [10, 5000])
    @pytest.mark.parametrize("batch", BATCHES)
    def test_it_never_looks_at_the_device(self, batch: str, vocab: int) -> None:
        sampling = _on_meta(BATCHES[batch], vocab)
        logits = torch.empty(len(sampling), vocab, device=META)
        with kernels.allowed("meta"):
            sampler: Sampler = self.build(SamplerContext(vocab_size=vocab, device=META))
        for _ in range(2):
            with NoLooks(META), observed(lambda launch: False):
                tokens = sampler.sample(logits, sampling)
            assert (tokens.device, tokens.dtype) == (META, torch.int64)
            assert tokens.shape == (len(sampling),)

    @capability("no_sync")
    def test_logprobs_never_look_at_the_device(self) -> None:
        wants = [
            LogprobRequest(top=2),
            None,
            LogprobRequest(top=5, token_ids=(9, 1, 1)),
            LogprobRequest(token_ids=(4,)),
        ]
        sampling = _on_meta([GREEDY] * len(wants), 10)
        sampling.logprobs, sampling.logprob_ids = tuple(wants), torch.empty(4, dtype=torch.int64, device=META)
        logits, tokens = torch.empty(4, 10, device=META), torch.empty(4, dtype=torch.int64, device=META)
        with kernels.allowed("meta"):
            sampler: Sampler = self.build(SamplerContext(vocab_size=10, device=META))
        with NoLooks(META), observed(lambda launch: False):
            output = sampler.logprobs(logits, tokens, sampling)
        assert output.token_logprobs.shape == (4,)
        assert output.top_ids is not None
        assert output.top_ids.shape == (4, 5)
        assert {row: len(chosen) for row, chosen in output.chosen.items()} == {2: 3, 3: 1}


def _on_meta(requests: list[SamplingParams], vocab: int) -> SamplingBatch:
    rows = np.array([params.row(seed, vocab) for seed, params in enumerate(requests)], list(SAMPLING_ROW))
    steps = torch.empty(len(requests), dtype=torch.int64, device=META)
    return SamplingBatch.of(rows, steps, vocab, lambda array: torch.from_numpy(array).to(META))
