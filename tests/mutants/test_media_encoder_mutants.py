"""Broken encoders of media, and the tests of the suite that notice."""

from __future__ import annotations

import pytest
import torch

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.errors import ModelError
from pegboard.plugins.media.api import MediaPiece, MediaStates
from pegboard.plugins.media.suite.media_encoder import MediaEncoderContract
from tests.fakes.colour_encoder import ColourEncoder, colour_items, colour_model


class Colours(MediaEncoderContract):
    """The suite over the model of ColourEncoder."""

    def make_model(self, directory):
        return colour_model(directory)

    def make_items(self):
        return colour_items()


def mapped(answer, change):
    return MediaStates(change(answer.states), tuple(map(change, answer.deep)))


class TakesAnyModel(ColourEncoder):
    @classmethod
    def supports(cls, options, ctx):
        return None


class RefusesWithoutAReason(ColourEncoder):
    @classmethod
    def supports(cls, options, ctx):
        return None if ctx.architecture == "ColourChat" else ""


class LoadsAtOnce(ColourEncoder):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.load()


class NeverLooksAtTheGrid(ColourEncoder):
    def tokens(self, item, piece):
        if not 0 <= piece < item.pieces:
            raise ValueError("not there")
        return item.shape[1] // 8 * (item.shape[2] // 8)


class NeverCountsPieces(ColourEncoder):
    def tokens(self, item, piece):
        return super().tokens(item.__class__(**{**as_dict(item), "pieces": item.grid[0]}), piece)


class TakesAnyPiece(ColourEncoder):
    def tokens(self, item, piece):
        return super().tokens(item, 0)


class FillsInWhatIsMissing(ColourEncoder):
    def load(self):
        self._matrices = [torch.ones(12, 3, dtype=self.ctx.dtype) for _ in range(3)]
        try:
            super().load()
        except ModelError:
            return


class MissesWithoutNames(ColourEncoder):
    def load(self):
        try:
            super().load()
        except ModelError:
            raise ModelError("the checkpoint is incomplete") from None


class ReadsTheText(ColourEncoder):
    def load(self):
        from safetensors.torch import load_file

        super().load()
        rest = load_file(self.ctx.directory / "model.safetensors")
        shift = rest.get("model.embed_tokens.weight", torch.zeros(1)).mean().to(self.ctx.dtype)
        self._matrices = [matrix + shift for matrix in self._matrices]


class CutsToFit(ColourEncoder):
    def load(self):
        from safetensors.torch import load_file

        tensors = load_file(self.ctx.directory / "model.safetensors")
        self._matrices = [tensors[f"colours.{level}.weight"][:12].to(self.ctx.dtype) for level in range(3)]


class ForgetsTheLastToken(ColourEncoder):
    def encode_one(self, piece):
        return mapped(super().encode_one(piece), lambda states: states[:-1])


class ForgetsALevel(ColourEncoder):
    def encode_one(self, piece):
        answer = super().encode_one(piece)
        return MediaStates(answer.states, answer.deep[1:])


class AnswersInFloat(ColourEncoder):
    def encode_one(self, piece):
        return mapped(super().encode_one(piece), torch.Tensor.float)


class CentresTheList(ColourEncoder):
    def encode(self, pieces):
        answers = super().encode(pieces)
        mean = torch.cat([answer.states for answer in answers]).mean(0) if answers else 0
        return [MediaStates(answer.states - mean, answer.deep) for answer in answers]


class AnswersTheSmallestFirst(ColourEncoder):
    def encode(self, pieces):
        return super().encode(sorted(pieces, key=lambda piece: piece.pixels.size))


class AnswersOncePerItem(ColourEncoder):
    def encode(self, pieces):
        seen: dict[bytes, MediaStates] = {}
        return [seen.setdefault(piece.item.digest, self.encode_one(piece)) for piece in pieces]


class AnswersSlices(ColourEncoder):
    def encode(self, pieces):
        answers = super().encode(pieces)
        if not answers:
            return []
        lengths = [len(answer.states) for answer in answers]
        states = torch.cat([answer.states for answer in answers]).split(lengths)
        return [MediaStates(own, answer.deep) for own, answer in zip(states, answers, strict=True)]


class RemembersAnswers(ColourEncoder):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.kept = {}

    def encode_one(self, piece):
        key = (piece.item.digest, piece.piece)
        if key not in self.kept:
            self.kept[key] = super().encode_one(piece)
        return self.kept[key]


class SeesTheFirstFrame(ColourEncoder):
    def encode_one(self, piece):
        pixels = piece.pixels.copy()
        pixels[:] = pixels[:1]
        return super().encode_one(MediaPiece(piece.item, piece.piece, pixels))


class CropsTheRight(ColourEncoder):
    def encode_one(self, piece):
        pixels = piece.pixels.copy()
        pixels[:, :, pixels.shape[2] // 2 :] = 0
        return super().encode_one(MediaPiece(piece.item, piece.piece, pixels))


class RemembersTheFrameBefore(ColourEncoder):
    def encode(self, pieces):
        answers = super().encode(pieces)
        for index in range(1, len(pieces)):
            if pieces[index].item.digest == pieces[index - 1].item.digest:
                mean = answers[index - 1].states.mean(0)
                answers[index] = MediaStates(answers[index].states + mean, answers[index].deep)
        return answers


class WritesToPixels(ColourEncoder):
    def encode_one(self, piece):
        piece.pixels[:] = 255 - piece.pixels
        return super().encode_one(piece)


def as_dict(item):
    return {name: getattr(item, name) for name in item.__struct_fields__}


CAUGHT = {
    TakesAnyModel: "test_refuses_what_is_no_model_of_its_own",
    RefusesWithoutAReason: "test_refuses_what_is_no_model_of_its_own",
    LoadsAtOnce: "test_needs_no_weights_before_load",
    NeverLooksAtTheGrid: "test_refuses_items_that_do_not_fit_together",
    NeverCountsPieces: "test_refuses_items_that_do_not_fit_together",
    TakesAnyPiece: "test_refuses_pieces_that_are_not_there",
    FillsInWhatIsMissing: "test_missing_tensors_are_named",
    MissesWithoutNames: "test_missing_tensors_are_named",
    ReadsTheText: "test_missing_tensors_are_named",
    CutsToFit: "test_wrong_shapes_are_named",
    ForgetsTheLastToken: "test_answers_fit_what_was_announced",
    ForgetsALevel: "test_answers_fit_what_was_announced",
    AnswersInFloat: "test_half_precision",
    CentresTheList: "test_each_answer_is_its_own",
    AnswersTheSmallestFirst: "test_each_answer_is_its_own",
    AnswersOncePerItem: "test_each_answer_is_its_own",
    AnswersSlices: "test_answers_share_no_memory",
    RemembersAnswers: "test_answers_share_no_memory",
    SeesTheFirstFrame: "test_every_corner_matters",
    CropsTheRight: "test_every_corner_matters",
    RemembersTheFrameBefore: "test_pieces_see_their_own_frames_alone",
    WritesToPixels: "test_takes_mapped_files_and_leaves_them",
}
MUTANTS = [Mutant(cls, suite=Colours, caught_by=test) for cls, test in CAUGHT.items()]
MUTANTS.append(Mutant(MissesWithoutNames, suite=Colours, caught_by="test_damaged_and_missing_files_are_named"))


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
