"""Broken model runners with overlays and positions of three axes, each caught by the test that is meant for it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import pytest

from pegboard.conformance.model_runner import ModelRunnerContract
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.forward import EmbedOverlay, ForwardBatch, ForwardOutput
from pegboard.core.interfaces.sampling import SamplingBatch
from pegboard.plugins.runner_layered.runner import LayeredRunner


class Changing(LayeredRunner):
    """Not broken: `change` may spoil each batch before it is computed."""

    def change(self, batch: ForwardBatch) -> ForwardBatch:
        return batch

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        return super().execute(self.change(batch), sampling, **wants)

    def execute_in_parts(
        self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool
    ) -> Generator[None, None, ForwardOutput]:
        return super().execute_in_parts(self.change(batch), sampling, **wants)


class IgnoresOverlays(Changing):
    def change(self, batch: ForwardBatch) -> ForwardBatch:
        return replace(batch, overlay=None)


class ForgetsDeepStates(Changing):
    def change(self, batch: ForwardBatch) -> ForwardBatch:
        return batch if batch.overlay is None else replace(batch, overlay=replace(batch.overlay, deep=()))


class CountsRowsPerRequest(Changing):
    """From the beginning of the last request, as code does that has met one request per batch."""

    def change(self, batch: ForwardBatch) -> ForwardBatch:
        if batch.overlay is None or batch.extend_start_loc is None:
            return batch
        rows = batch.overlay.rows - batch.extend_start_loc[-1].clamp(max=int(batch.overlay.rows[0]))
        return replace(batch, overlay=replace(batch.overlay, rows=rows))


class OverlaysStay(Changing):
    """In buffers that the next batch finds as they were."""

    kept: EmbedOverlay | None = None

    def change(self, batch: ForwardBatch) -> ForwardBatch:
        self.kept = batch.overlay or self.kept
        return replace(batch, overlay=self.kept)


class PartsHaveNoOverlay(LayeredRunner):
    def execute_in_parts(
        self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool
    ) -> Generator[None, None, ForwardOutput]:
        return super().execute_in_parts(replace(batch, overlay=None), sampling, **wants)


class BatchesShareOverlays(LayeredRunner):
    """What runs in a pause takes the place of what the paused batch has yet to add."""

    paused: ForwardBatch | None = None

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        output = super().execute(batch, sampling, **wants)
        if self.paused is not None:
            self.paused.overlay = batch.overlay
        return output

    def execute_in_parts(
        self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool
    ) -> Generator[None, None, ForwardOutput]:
        self.paused = batch
        output = yield from super().execute_in_parts(batch, sampling, **wants)
        self.paused = None
        return output


class SeesTimeAlone(Changing):
    def change(self, batch: ForwardBatch) -> ForwardBatch:
        return batch if batch.positions.dim() == 1 else replace(batch, positions=batch.positions[0])


class MistakesHeightForWidth(Changing):
    def change(self, batch: ForwardBatch) -> ForwardBatch:
        return batch if batch.positions.dim() == 1 else replace(batch, positions=batch.positions[[0, 2, 1]])


class AxesAreSlightlyOff(Changing):
    """All are one further, which only roundings show, since attention sees differences of positions."""

    def change(self, batch: ForwardBatch) -> ForwardBatch:
        return batch if batch.positions.dim() == 1 else replace(batch, positions=batch.positions + 1)


class DecodesAtTheirIndex(Changing):
    def change(self, batch: ForwardBatch) -> ForwardBatch:
        return replace(batch, positions=batch.seq_lens - 1) if batch.forward_mode.is_decode else batch


class Refusing(LayeredRunner):
    """Not broken: a runner without the capability, which says so."""

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        if batch.overlay is not None:
            raise Unsupported("refusing", "runner.overlay")
        return super().execute(batch, sampling, **wants)


class IgnoresInSilence(Refusing):
    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None, **wants: bool) -> ForwardOutput:
        return super().execute(replace(batch, overlay=None), sampling, **wants)


def mutant(factory: type, caught_by: str, base: type | None = None, provides: frozenset[str] | None = None) -> Mutant:
    return Mutant(factory, suite=ModelRunnerContract, caught_by=caught_by, base=base, provides=provides)


MUTANTS = [
    mutant(IgnoresOverlays, "test_states_take_the_place_of_embeddings"),
    mutant(ForgetsDeepStates, "test_states_take_the_place_of_embeddings"),
    mutant(CountsRowsPerRequest, "test_an_overlay_may_be_cut"),
    mutant(OverlaysStay, "test_an_overlay_leaves_nothing_behind"),
    mutant(PartsHaveNoOverlay, "test_an_overlay_in_parts"),
    mutant(BatchesShareOverlays, "test_an_overlay_in_parts"),
    mutant(SeesTimeAlone, "test_each_frequency_has_its_axis"),
    mutant(MistakesHeightForWidth, "test_each_frequency_has_its_axis"),
    mutant(AxesAreSlightlyOff, "test_equal_axes_are_plain_positions"),
    mutant(DecodesAtTheirIndex, "test_decodes_go_on_from_their_own_positions"),
    mutant(IgnoresInSilence, "test_an_overlay_is_refused", provides=frozenset()),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
