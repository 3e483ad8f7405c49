"""Broken processors of media, and the tests of the suite that notice."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import pytest

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.plugins.media.api import MediaLayout, MediaShape, MediaSpan
from pegboard.plugins.media.suite.media_processor import MediaProcessorContract
from pegboard.plugins.mm_qwen_vl.processor import QwenVLProcessor
from pegboard.toolkit.media.inputs import MediaKind
from tests.plugins.mm_qwen_vl.models import config
from tests.plugins.mm_qwen_vl.test_processor_conformance import FILES, PLACEHOLDERS, files


class Suite(MediaProcessorContract):
    """The suite with a model and media for it."""

    contract = "media_processor"
    config = config("qwen3")
    files = FILES
    placeholders = PLACEHOLDERS

    def media(self, kind: MediaKind) -> Sequence[bytes]:
        return files(kind)


class TakesAnyModel(QwenVLProcessor):
    @classmethod
    def supports(cls, options, ctx):
        return None


class HidesWhatIsMissing(QwenVLProcessor):
    @classmethod
    def supports(cls, options, ctx):
        try:
            return super().supports(options, ctx)
        except ModuleNotFoundError as error:
            return str(error)


class WantsALibraryForAnyModel(QwenVLProcessor):
    @classmethod
    def supports(cls, options, ctx):
        if find_spec("PIL") is None:
            raise ModuleNotFoundError("pictures need Pillow", name="PIL")
        return super().supports(options, ctx)


class TakesSound(QwenVLProcessor):
    @property
    def kinds(self):
        return frozenset(("image", "video", "audio"))


class ReservesNothing(QwenVLProcessor):
    reserved = frozenset()


class NamesNoKind(QwenVLProcessor):
    def part(self, kind):
        return {"type": "media"}


class ImportsPillow(QwenVLProcessor):
    pass


ImportsPillow.__module__ = "pegboard.plugins.mm_qwen_vl.pictures"


class ForgetsTheLastFrame(QwenVLProcessor):
    def prepare(self, source, out):
        shape = super().prepare(source, out)
        frames, height, width, _ = shape.shape
        return dataclasses.replace(shape, shape=(frames + 2, height, width, 3), pieces=shape.pieces + 1)


class CutsAPiece(QwenVLProcessor):
    def prepare(self, source, out):
        shape = super().prepare(source, out)
        return dataclasses.replace(shape, pieces=shape.shape[0] + 1)


class HoldsTheVideo(QwenVLProcessor):
    def prepare(self, source, out):
        whole = io.BytesIO()
        shape = super().prepare(source, whole)
        out.write(whole.getvalue())
        return shape


class CountsItsCalls(QwenVLProcessor):
    calls = 0

    def prepare(self, source, out):
        type(self).calls += 1
        shape = super().prepare(source, out)
        return dataclasses.replace(shape, times=(float(self.calls),))


class SeesGrey(QwenVLProcessor):
    def prepare(self, source, out):
        shape = super().prepare(source, io.BytesIO())
        for _ in range(shape.shape[0]):
            out.write(bytes(shape.shape[1] * shape.shape[2] * 3))
        return shape


class LeavesAFile(QwenVLProcessor):
    def prepare(self, source, out):
        source.file.with_suffix(".tmp").write_bytes(b"")
        return super().prepare(source, out)


class Enlarges(QwenVLProcessor):
    def prepare(self, source, out):
        settings = source.settings
        if settings.max_pixels is not None:
            settings = type(settings)(min_pixels=settings.max_pixels * 8)
        return super().prepare(dataclasses.replace(source, settings=settings), out)


class KnowsNoLimits(QwenVLProcessor):
    def __init__(self, options, ctx):
        super().__init__(options, dataclasses.replace(ctx, limits=type(ctx.limits)()))


class EncodesAnything(QwenVLProcessor):
    def __init__(self, options, ctx):
        super().__init__(options, dataclasses.replace(ctx, limits=dataclasses.replace(ctx.limits, piece_tokens=None)))


class PaintsWhatItCannotRead(QwenVLProcessor):
    def prepare(self, source, out):
        try:
            return super().prepare(source, out)
        except Exception:
            out.write(bytes(56 * 56 * 3))
            return MediaShape((1, 56, 56, 3), (1, 4, 4))


class NamesTheFile(QwenVLProcessor):
    def prepare(self, source, out):
        try:
            return super().prepare(source, out)
        except Exception as error:
            raise type(error)(f"{source.file}: {error}") from error


class FailsOtherwise(QwenVLProcessor):
    def prepare(self, source, out):
        try:
            return super().prepare(source, out)
        except Exception as error:
            raise ValueError("it cannot be read") from error


class Relaid(QwenVLProcessor):
    """Changes what `lay_out` answers."""

    def lay_out(self, ids, items, encode):
        return self.changed(super().lay_out(ids, items, encode), ids)

    def changed(self, layout, ids):
        return layout


class CountsFromOne(Relaid):
    def changed(self, layout, ids):
        return dataclasses.replace(layout, positions=layout.positions + 1)


class AnswersInLongs(Relaid):
    def changed(self, layout, ids):
        return dataclasses.replace(layout, positions=layout.positions.astype(np.int64))


class MergesSpans(Relaid):
    def changed(self, layout, ids):
        merged = {span.item: span for span in reversed(layout.spans)}
        return dataclasses.replace(layout, spans=tuple(merged[index] for index in sorted(merged)))


class SpansTheTextBefore(Relaid):
    def changed(self, layout, ids):
        spans = tuple(MediaSpan(one.item, one.piece, max(0, one.start - 2), one.count) for one in layout.spans)
        return dataclasses.replace(layout, spans=spans)


class LosesAToken(Relaid):
    def changed(self, layout, ids):
        if len(layout.spans) < 2:
            return layout
        return MediaLayout(
            np.delete(layout.ids, -1), layout.spans, np.delete(layout.positions, -1, axis=1), layout.delta
        )


class ShiftsByTheLength(Relaid):
    def changed(self, layout, ids):
        start = layout.spans[0].start if layout.spans else 0
        positions = layout.positions.copy()
        positions[:, start:] += len(layout.ids)
        return dataclasses.replace(layout, positions=positions, delta=layout.delta + len(layout.ids))


class ForgetsTheDelta(Relaid):
    def changed(self, layout, ids):
        return dataclasses.replace(layout, delta=layout.delta - 1000)


class TakesTheIds(Relaid):
    def changed(self, layout, ids):
        ids.clear()
        return layout


class Remembers(Relaid):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.asked = 0

    def changed(self, layout, ids):
        self.asked += 1
        return dataclasses.replace(layout, delta=layout.delta + self.asked)


class FillsUp(QwenVLProcessor):
    def lay_out(self, ids, items, encode):
        wanted = sum(one in PLACEHOLDERS.values() for one in ids)
        return super().lay_out(ids, [*items, *[items[-1]] * wanted][:wanted] if items else [], encode)


class ChecksBackwards(QwenVLProcessor):
    def check_places(self, ids, kinds):
        super().check_places(ids, [*kinds, *kinds])


class ExpectsAShare(QwenVLProcessor):
    def expected_pixels(self, source):
        return super().expected_pixels(source) / 2


class CountsNoTokens(QwenVLProcessor):
    def shape_of(self, kind, grid, times, tokens):
        return super().shape_of(kind, grid, times, grid[0] * grid[1] * grid[2] // 4)


class ListsTheGrid(QwenVLProcessor):
    def shape_of(self, kind, grid, times, tokens):
        np.zeros(grid, bool)
        return super().shape_of(kind, grid, times, tokens)


class ShowsAPictureTwice(QwenVLProcessor):
    def shape_of(self, kind, grid, times, tokens):
        made = super().shape_of(kind, grid, times, tokens)
        return dataclasses.replace(made, shape=(2 * grid[0], *made.shape[1:]))


class TakesAnyTime(QwenVLProcessor):
    def shape_of(self, kind, grid, times, tokens):
        made = super().shape_of(kind, grid, [0.5] * len(times), tokens)
        return dataclasses.replace(made, times=tuple(times))


CAUGHT = [
    (ShowsAPictureTwice, "test_encoded_items_have_the_shape_of_prepared_ones"),
    (CountsNoTokens, "test_numbers_that_do_not_belong_together_are_refused"),
    (TakesAnyTime, "test_numbers_that_do_not_belong_together_are_refused"),
    (ListsTheGrid, "test_large_grids_cost_nothing"),
    (TakesAnyModel, "test_a_model_without_media_is_not_supported"),
    (HidesWhatIsMissing, "test_a_missing_library_is_told_apart_from_a_foreign_model"),
    (WantsALibraryForAnyModel, "test_a_missing_library_is_told_apart_from_a_foreign_model"),
    (TakesSound, "test_kinds_are_known"),
    (ReservesNothing, "test_reserved_are_spellings"),
    (NamesNoKind, "test_parts_are_json"),
    (ImportsPillow, "test_imports_no_decoder"),
    (ForgetsTheLastFrame, "test_pixels_fill_the_shape"),
    (CutsAPiece, "test_pixels_fill_the_shape"),
    (HoldsTheVideo, "test_pixels_fill_the_shape"),
    (CountsItsCalls, "test_preparing_is_deterministic"),
    (SeesGrey, "test_different_media_differ"),
    (LeavesAFile, "test_files_stay_as_they_are"),
    (Enlarges, "test_fewer_pixels_where_they_are_asked_for"),
    (KnowsNoLimits, "test_limits_are_kept"),
    (EncodesAnything, "test_pieces_have_few_tokens"),
    (KnowsNoLimits, "test_large_sources_are_refused"),
    (PaintsWhatItCannotRead, "test_what_is_no_media_is_refused"),
    (NamesTheFile, "test_what_is_no_media_is_refused"),
    (PaintsWhatItCannotRead, "test_truncated_pictures_are_refused"),
    (FailsOtherwise, "test_damaged_media_raise_nothing_else"),
    (CountsFromOne, "test_text_stays_as_it_is"),
    (AnswersInLongs, "test_text_stays_as_it_is"),
    (MergesSpans, "test_layouts_are_whole"),
    (SpansTheTextBefore, "test_layouts_are_whole"),
    (LosesAToken, "test_layouts_are_whole"),
    (ShiftsByTheLength, "test_what_follows_changes_nothing_before_it"),
    (ForgetsTheDelta, "test_positions_go_on_after_the_prompt"),
    (TakesTheIds, "test_laying_out_is_pure"),
    (Remembers, "test_laying_out_is_pure"),
    (FillsUp, "test_a_mismatch_is_refused"),
    (ChecksBackwards, "test_a_mismatch_is_refused"),
    (ExpectsAShare, "test_any_file_has_a_number_of_expected_pixels"),
]
ENCODED = frozenset({"encoded"})
MUTANTS = [Mutant(cls, suite=Suite, caught_by=test, base=QwenVLProcessor, provides=ENCODED) for cls, test in CAUGHT]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: f"{one}-{one.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
