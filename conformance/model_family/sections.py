"""The suite of ModelFamily: networks of which each process computes some of the layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pegboard.conformance.model_family.base import ModelSuite, assert_close
from pegboard.conformance.model_family.ranks import on_ranks_of
from pegboard.conformance.rig.model_references import context, prompts
from pegboard.conformance.rig.paged import PagedRun
from pegboard.conformance.rig.ranks import on_sections
from pegboard.conformance.suite import capability
from pegboard.core.interfaces.layers import LayerSpec
from pegboard.toolkit.kernels import usable_on_cpu
from pegboard.toolkit.model.ranks import Ranks
from pegboard.toolkit.model.sections import Sections

COUNT = 2
TOO_MANY = 100
"""More than any tiny model has layers."""


class SectionTests(ModelSuite):
    """Compared with one process. Models that are refused in sections are left out."""

    @pytest.fixture
    def in_threads(self) -> None:
        """Skip where sections cannot be threads."""
        if usable_on_cpu():
            pytest.skip("sections are threads here, and Triton's interpreter runs in one at a time")

    @pytest.mark.usefixtures("in_threads")
    @capability("sections")
    def test_sections_have_the_logits_of_one(self, architecture: str, checkpoint: Path) -> None:
        """Of the rows that a batch wants: of all, of some, and of none. The first section has them."""
        self.skip_if_it_objects(on_ranks_of(checkpoint, _section(COUNT)))
        long, middle, short = prompts(checkpoint)
        steps = ({0: long[:30], 1: middle[:-1]}, {0: long[30:-1], 1: middle[-1:], 2: short}, {0: long[-1:]})
        wanted: tuple[list[int] | None, ...] = ([], [0, len(long) - 31], None)

        def computes(ranks: Ranks) -> list[torch.Tensor]:
            family = self.build(on_ranks_of(checkpoint, ranks))
            run = PagedRun(family.load(), family.spec)
            return [_logits(run, step, rows) for step, rows in zip(steps, wanted, strict=True)]

        (alone,), found = on_sections(1, computes), on_sections(COUNT, computes)
        for own, expected, rows in zip(found[0], alone, wanted, strict=True):
            if rows != []:
                assert_close(own, expected)

    @capability("sections")
    def test_each_layer_is_in_one_section(self, architecture: str, checkpoint: Path) -> None:
        """By its number in the model. What the config says of all layers stays."""
        self.skip_if_it_objects(on_ranks_of(checkpoint, _section(COUNT)))
        whole = self.build(context(checkpoint)).spec
        found = [self.build(on_ranks_of(checkpoint, _section(COUNT, index))).spec for index in range(COUNT)]
        layers: list[LayerSpec] = [layer for spec in found for layer in spec.layers]
        assert layers == list(whole.layers)
        assert all(spec.layers and spec.hidden_size == whole.hidden_size for spec in found)
        assert {spec.max_context_len for spec in found} == {whole.max_context_len}

    @capability("sections")
    def test_layers_are_divided_as_the_config_says(self, architecture: str, checkpoint: Path) -> None:
        self.skip_if_it_objects(on_ranks_of(checkpoint, _section(COUNT)))
        count = len(self.build(context(checkpoint)).spec.layers)
        for own in ((1, count - 1), (count - 1, 1)):
            families = [self.build(on_ranks_of(checkpoint, _section(COUNT, index, own))) for index in range(COUNT)]
            assert [len(family.spec.layers) for family in families] == list(own)
        for wrong in ((0, count), (1, count), (count,)):
            assert self.objection(on_ranks_of(checkpoint, _section(COUNT, 0, wrong))), f"layers {wrong} are not refused"

    @capability("sections")
    def test_sections_without_layers_are_refused(self, architecture: str, checkpoint: Path) -> None:
        self.skip_if_it_objects(context(checkpoint))
        assert self.objection(on_ranks_of(checkpoint, _section(TOO_MANY))), f"{TOO_MANY} sections are not refused"


def _section(count: int, index: int = 0, layers: tuple[int, ...] = ()) -> Ranks:
    return Ranks(sections=Sections(count, index, layers))


@torch.inference_mode()
def _logits(run: PagedRun, new: dict[int, list[int]], rows: list[int] | None) -> torch.Tensor:
    """Return the logits of these packed tokens, of which the batch wants half as hidden states."""
    batch = run.batch(new)
    if rows is not None:
        batch.logits_indices, batch.hidden_rows = torch.tensor(rows[:1], dtype=torch.int64), None
        if rows:
            batch.hidden_rows = torch.tensor(rows[1:])
    run.attention.prepare(batch)
    hidden = run.network.forward(batch)
    kept = torch.arange(batch.num_tokens) if rows is None else torch.from_numpy(np.array(rows, np.int64))
    return run.network.logits(hidden.index_select(0, kept))
