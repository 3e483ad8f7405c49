"""What a batch adds to products of transformers' modules, where the suite's architectures do not lead."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pegboard.conformance.rig.paged import PagedRun
from pegboard.plugins.model_transformers.network import TransformersNetwork
from pegboard.toolkit.model.linear import SITES, NetworkSites
from tests.plugins.model_transformers.test_served import loaded
from tests.plugins.model_transformers.tiny import SERVED, context, save

PROMPT = [5, 9, 7, 3]


class Ones:
    """Adds one at every site, and counts the calls."""

    def __init__(self) -> None:
        self.calls = Counter[int]()

    def add(self, site: int, x: torch.Tensor, out: torch.Tensor) -> None:
        self.calls[site] += 1
        out += 1.0


def made(name: str, tmp_path: Path) -> tuple[TransformersNetwork, PagedRun, NetworkSites]:
    sites = NetworkSites()
    family, network = loaded(replace(context(save(tmp_path, *SERVED[name])), services={SITES: sites}))
    return network, PagedRun(network, family.spec), sites


def logits(network: TransformersNetwork, run: PagedRun, additions: Ones, row: int = 0) -> torch.Tensor:
    batch = run.batch({row: PROMPT})
    batch.additions = additions
    run.attention.prepare(batch)
    with torch.inference_mode():
        return network.logits(network.forward(batch))


@pytest.mark.parametrize("name", ["llama4", "qwen2_moe"])
def test_routers_that_return_several_tensors_are_no_sites(name: str, tmp_path: Path) -> None:
    network, run, sites = made(name, tmp_path)
    additions = Ones()
    assert torch.isfinite(logits(network, run, additions)).all()
    assert additions.calls == {site.number: 1 for site in sites.all}
    assert not any("router" in part.name for site in sites.all for part in site.parts)


def test_layers_that_are_no_longer_merged_are_added_to(tmp_path: Path) -> None:
    """As where a probe has found that merged layers compute something else."""
    network, run, sites = made("llama", tmp_path)
    merged, additions = logits(network, run, Ones()), Ones()
    while network.replaced.give_up() is not None:
        pass
    assert not any(network.replaced.counts.values())
    torch.testing.assert_close(logits(network, run, additions, row=1), merged, rtol=1e-4, atol=1e-4)
    assert additions.calls.keys() == {site.number for site in sites.all}
