"""The suite of ModelFamily: what a batch adds to the products of a network's linear layers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from pegboard.conformance.model_family.base import ModelSuite, assert_close
from pegboard.conformance.rig.model_references import context, prompts, transformers_model
from pegboard.conformance.rig.paged import PagedRun
from pegboard.conformance.suite import capability
from pegboard.core.interfaces.model_family import ModelFamily
from pegboard.toolkit.model.linear import SITES, NetworkSites, Site


class Deltas:
    """Adds x times a matrix of each site, and counts its calls. `rows` are those of the batch that get it."""

    def __init__(self, sites: tuple[Site, ...], rows: slice) -> None:
        draw = torch.Generator().manual_seed(3)
        self.matrices = {site.number: torch.randn(site.rows, site.cols, generator=draw) * 0.05 for site in sites}
        self.calls: dict[int, list[int]] = {site.number: [] for site in sites}
        self._rows = rows

    def add(self, site: int, x: torch.Tensor, out: torch.Tensor) -> None:
        self.calls[site].append(x.shape[0])
        out[self._rows] += (x @ self.matrices[site].T)[self._rows]


def part_name(name: str) -> str:
    """Return the name of a linear layer as it would be in a model for text alone."""
    return name.replace("language_model.", "")


def changed_model(checkpoint: Path, deltas: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Return transformers' model with matrices added to its linear layers, by name."""
    model: torch.nn.Module = copy.deepcopy(transformers_model(checkpoint))
    modules = {part_name(name): module for name, module in model.named_modules()}
    for name, delta in deltas.items():
        weight = modules[name].weight
        assert isinstance(weight, torch.nn.Parameter)
        weight.data += delta
    return model


def absorbed(name: str) -> bool:
    """Return whether a linear layer expands latents (MLA), which attention reads as they are."""
    return name.endswith(".kv_b_proj")


def keeps_states(name: str) -> bool:
    """Return whether a linear layer is part of a module that keeps states, which computes a batch in parts."""
    return ".mamba." in name


class AdditionTests(ModelSuite):
    """Compared with a model whose weights have in them what is added."""

    def _with_sites(self, checkpoint: Path) -> tuple[PagedRun, tuple[Site, ...]]:
        sites = NetworkSites()
        ctx = replace(context(checkpoint), services={SITES: sites})
        family: ModelFamily = self.build(ctx)
        return PagedRun(family.load(), family.spec), sites.all

    def _logits(self, run: PagedRun, new: dict[int, list[int]], deltas: Deltas, *, decode: bool) -> torch.Tensor:
        batch = run.batch(new, decode=decode)
        batch.additions = deltas
        run.attention.prepare(batch)
        with torch.inference_mode():
            return run.network.logits(run.network.forward(batch))

    @capability("additions")
    def test_it_names_its_sites(self, architecture: str, checkpoint: Path) -> None:
        """All linear layers of decoder layers but routers, experts, up-projections of latents and what keeps states,
        once each, with their sizes.
        """
        _, sites = self._with_sites(checkpoint)
        assert len({site.number for site in sites}) == len(sites)
        found = {part.name: (part.rows, site.cols) for site in sites for part in site.parts}
        assert len(found) == sum(len(site.parts) for site in sites)
        wanted = {
            part_name(name): (module.out_features, module.in_features)
            for name, module in transformers_model(checkpoint).named_modules()
            if isinstance(module, torch.nn.Linear) and ".layers." in name and "visual" not in name
        }
        left_out = {name for name in wanted if "expert" in name or absorbed(name) or keeps_states(name)}
        assert {name: size for name, size in wanted.items() if name not in left_out} == found

    @capability("additions")
    def test_what_is_added_counts(self, architecture: str, checkpoint: Path) -> None:
        """At every site, once, and for the rows that get it: chunks, a ragged batch and decodes."""
        run, sites = self._with_sites(checkpoint)
        long, middle, _ = prompts(checkpoint)
        first = {0: long[:20], 1: middle}
        deltas = Deltas(sites, slice(0, 20))
        by_name, offsets = {}, {}
        for site in sites:
            offsets[site.number] = 0
            for part in site.parts:
                start = offsets[site.number]
                by_name[part.name] = deltas.matrices[site.number][start : start + part.rows]
                offsets[site.number] += part.rows
        changed = changed_model(checkpoint, by_name)
        with torch.inference_mode():
            expected = changed(torch.tensor([long]), use_cache=False).logits[0].float()
            plain = transformers_model(checkpoint)(torch.tensor([middle]), use_cache=False).logits[0].float()
        assert float((expected[:20] - self._run(checkpoint).step({0: long[:20]})[0]).abs().max()) > 1e-2
        found = self._logits(run, first, deltas, decode=False)
        assert_close(found[:20], expected[:20])
        assert_close(found[20:], plain)
        assert deltas.calls == {site.number: [20 + len(middle)] for site in sites}
        both = Deltas(sites, slice(None))
        assert_close(self._logits(run, {0: long[20:22]}, both, decode=False), expected[20:22])
        assert_close(self._logits(run, {0: long[22:23]}, both, decode=True), expected[22:23])

    @capability("additions")
    def test_nothing_is_added_where_nothing_is_said(self, architecture: str, checkpoint: Path) -> None:
        """Also behind a batch with additions."""
        run, sites = self._with_sites(checkpoint)
        _, middle, short = prompts(checkpoint)
        self._logits(run, {0: short}, Deltas(sites, slice(None)), decode=False)
        with torch.inference_mode():
            plain = transformers_model(checkpoint)(torch.tensor([middle]), use_cache=False).logits[0].float()
        assert_close(run.step({1: middle})[1], plain)
