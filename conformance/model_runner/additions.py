"""The suite of ModelRunner: what a batch adds to products reaches the network."""

from __future__ import annotations

import pytest
import torch

from pegboard.conformance.model_runner.base import RunnerSuite
from pegboard.conformance.suite import capability
from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.forward import Additions, ForwardBatch
from pegboard.core.interfaces.model_family import Network


class NotingNetwork(Network):
    """Passes everything on, and notes what batches add."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.seen: list[Additions | None] = []

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.seen.append(batch.additions)
        return self._network.forward(batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._network.logits(hidden)


class Nothing:
    """Adds nothing."""

    def add(self, site: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """Leave `out` as it is."""


class RunnerAdditionTests(RunnerSuite):
    """Runners that run a network hand it what a batch adds. Others take only what a backend of their own makes."""

    @capability("additions")
    @capability("own_weights")
    def test_additions_that_it_does_not_know_are_refused(self, prompts: list[list[int]]) -> None:
        """Left out in silence, answers would be those of the model alone."""
        rig = self.rig()
        rig.additions = Nothing()
        with pytest.raises(Unsupported, match="additions"):
            rig.step({0: prompts[0]})
        assert len(rig.step({1: prompts[0]}).next_token_ids) == 1

    @capability("additions")
    def test_additions_reach_the_network(self, prompts: list[list[int]]) -> None:
        """Those of each batch, and no others: of chunks, decodes, and prefills in parts."""
        if "own_weights" in self.capabilities:
            pytest.skip("it runs no network")
        network = NotingNetwork(self.make_model().network)
        rig, first, second, third = self.rig(network=network), Nothing(), Nothing(), Nothing()
        rig.additions = first
        rig.step({0: prompts[0], 1: prompts[1][:5]}, None)
        rig.additions = second
        rig.step({0: prompts[0][:1]}, decode=True)
        rig.step({0: prompts[0][1:2]}, decode=True)
        rig.additions = third
        for _ in rig.in_parts({2: prompts[2]}):
            pass
        assert network.seen == [first, second, None, third]
