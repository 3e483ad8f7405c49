"""The conformance suite of MediaEncoder: pixels go in, states come out, each piece for itself.

It knows nothing of patches: pixels are drawn by the shape that an item states, and cut into its pieces.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pegboard.conformance.properties import properties
from pegboard.conformance.suite import ContractSuite
from pegboard.conformance.vl_checkpoints import vl_checkpoint
from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.model_family import ModelContext
from pegboard.plugins.media.api import MediaEncoder, MediaItem, MediaPiece, MediaStates
from pegboard.toolkit.media.inputs import MediaKind

TOLERANCE = 1e-4
"""Largest difference of two answers that must be equal, over the largest number in them. Sums in another order make
about 1e-6.
"""

_MOST_TENSORS = 16
"""Tensors of a checkpoint that are taken out one at a time."""

_NO_MODELS: tuple[Mapping[str, object], ...] = (
    {},
    {"architectures": ["NobodysForCausalLM"], "model_type": "nobodys"},
    {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64},
)

_MISFITS: Mapping[str, Callable[[MediaItem], Mapping[str, object]]] = {
    "a_frame_more": lambda item: {"shape": (item.shape[0] + 1, *item.shape[1:])},
    "a_row_more": lambda item: {"shape": (item.shape[0], item.shape[1] + 1, *item.shape[2:])},
    "a_column_more": lambda item: {"shape": (*item.shape[:2], item.shape[2] + 1, item.shape[3])},
    "twice_as_high": lambda item: {"shape": (item.shape[0], 2 * item.shape[1], *item.shape[2:])},
    "a_fourth_channel": lambda item: {"shape": (*item.shape[:3], 4)},
    "longer_grid": lambda item: {"grid": (item.grid[0] + 1, *item.grid[1:])},
    "twice_the_grid": lambda item: {"grid": (item.grid[0], 2 * item.grid[1], item.grid[2])},
    "grid_of_nothing": lambda item: {"grid": (item.grid[0], item.grid[1], 0)},
    "a_piece_more": lambda item: {"pieces": item.pieces + 1},
    "no_pieces": lambda item: {"pieces": 0},
}


class MediaEncoderContract(ContractSuite):
    """Answers fit what the encoder announced, and depend on a piece's own pixels and on nothing else.

    A subclass says which model the encoder is for, and what its processor makes of some media::

        class TestMyEncoder(MediaEncoderContract):
            provider = "my_encoder"

            def make_model(self, directory):
                return my_tiny_checkpoint(directory)

            def make_items(self):
                return [MediaItem(kind="image", digest=b"", file="", shape=(1, 32, 48, 3), grid=(1, 2, 3))]

    Unless it does, the model is a small Qwen3-VL, and an encoder for other models is hardly tested.
    """

    contract = "media_encoder"

    def make_model(self, directory: Path) -> Path:
        """Return a model directory with float32 weights in model.safetensors, in `directory` or below. Called once per
        test; a folder that is already there may be used again.
        """
        return vl_checkpoint(directory, "qwen3_vl")

    def make_items(self) -> Sequence[MediaItem]:
        """Return items that the model's processor could have made: of different sizes, and one of several pieces where
        the model takes video. Their digests and files do not matter.
        """
        return [_item("image", 1, 2, 2), _item("image", 1, 6, 12), _item("video", 3, 10, 4)]

    @pytest.fixture
    def directory(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Return the model's directory."""
        return self.make_model(tmp_path_factory.getbasetemp() / "media_encoder")

    def context(self, directory: Path, dtype: torch.dtype = torch.float32, **changes: object) -> ModelContext:
        """Return the context of a model directory, with fields of its config.json changed."""
        config = {**json.loads((directory / "config.json").read_text("utf-8")), **changes}
        return ModelContext(directory, config, dtype, torch.device("cpu"))

    def loaded(self, directory: Path, dtype: torch.dtype = torch.float32) -> MediaEncoder:
        encoder: MediaEncoder = self.build(self.context(directory, dtype))
        encoder.load()
        return encoder

    def pieces(self, seed: int = 0) -> list[MediaPiece]:
        """Return all pieces of all items, with random pixels."""
        draw = np.random.default_rng(seed)
        found = []
        for item in self.make_items():
            found += pieces_of(item, draw.integers(0, 256, item.shape, dtype=np.uint8))
        return found

    def encode(self, encoder: MediaEncoder, pieces: Sequence[MediaPiece]) -> list[MediaStates]:
        """As the worker does it."""
        with torch.inference_mode():
            return encoder.encode(pieces)

    # What is known without weights

    def test_refuses_what_is_no_model_of_its_own(self, directory: Path, tmp_path: Path) -> None:
        self.build(self.context(directory))
        for config in _NO_MODELS:
            reason: object = self.objection(ModelContext(tmp_path, config, torch.float32, torch.device("cpu")))
            assert isinstance(reason, str), f"accepts {config}"
            assert reason.strip(), "a refusal says why"

    def test_needs_no_weights_before_load(self, directory: Path, tmp_path: Path) -> None:
        whole: MediaEncoder = self.build(self.context(directory))
        copy = Path(shutil.copytree(directory, tmp_path / "copy"))
        (copy / "model.safetensors").unlink()
        assert self.objection(self.context(copy)) is None
        encoder: MediaEncoder = self.build(self.context(copy))
        assert encoder.levels == whole.levels >= 0
        for piece in self.pieces():
            assert encoder.tokens(piece.item, piece.piece) == whole.tokens(piece.item, piece.piece) > 0

    @pytest.mark.parametrize("misfit", _MISFITS)
    def test_refuses_items_that_do_not_fit_together(self, directory: Path, misfit: str) -> None:
        encoder: MediaEncoder = self.build(self.context(directory))
        for item in self.make_items():
            wrong = msgspec.structs.replace(item, **_MISFITS[misfit](item))
            _assert_refused(encoder, wrong, 0)

    def test_refuses_pieces_that_are_not_there(self, directory: Path) -> None:
        encoder: MediaEncoder = self.build(self.context(directory))
        for item in self.make_items():
            for piece in (-1, item.pieces):
                _assert_refused(encoder, item, piece)

    # Loading

    def test_missing_tensors_are_named(self, directory: Path, tmp_path: Path) -> None:
        """What it needs it misses by name, and what it does not need it does not read."""
        self.build(self.context(directory))
        expected = self.encode(self.loaded(directory), self.pieces()[:1])
        copy = Path(shutil.copytree(directory, tmp_path / "copy"))
        tensors = _tensors(directory)
        needed, unused = set(), set()
        for name in _some(sorted(tensors)):
            _save(copy, {other: tensor for other, tensor in tensors.items() if other != name})
            error = self._load_error(copy)
            if error is None:
                unused.add(name)
                continue
            needed.add(name)
            assert name in error, f"{name} is missing, and the error does not say so: {error}"
        assert needed, "no tensor of the checkpoint is missed"
        _save(copy, {**tensors, **{name: torch.full_like(tensors[name], torch.nan) for name in unused}})
        _assert_close(self.encode(self.loaded(copy), self.pieces()[:1]), expected)

    def test_wrong_shapes_are_named(self, directory: Path, tmp_path: Path) -> None:
        self.build(self.context(directory))
        copy = Path(shutil.copytree(directory, tmp_path / "copy"))
        tensors = _tensors(directory)
        noticed = 0
        for name in _some(sorted(tensors)):
            longer = torch.cat((tensors[name], tensors[name][:1]))
            _save(copy, {**tensors, name: longer})
            error = self._load_error(copy)
            if error is None:
                continue
            noticed += 1
            assert name in error
            assert str(list(longer.shape)) in error.replace("(", "[").replace(")", "]"), error
        assert noticed, "tensors of any shape are taken"

    def test_damaged_and_missing_files_are_named(self, directory: Path, tmp_path: Path) -> None:
        self.build(self.context(directory))
        copy = Path(shutil.copytree(directory, tmp_path / "copy"))
        (copy / "model.safetensors").write_bytes(b"\xff" * 64)
        assert "model.safetensors" in str(self._load_error(copy))
        (copy / "model.safetensors").unlink()
        assert str(copy) in str(self._load_error(copy))

    def _load_error(self, directory: Path) -> str | None:
        encoder: MediaEncoder = self.build(self.context(directory))
        try:
            encoder.load()
        except ModelError as error:
            return str(error)
        return None

    # Answers

    def test_answers_fit_what_was_announced(self, directory: Path) -> None:
        encoder, pieces = self.loaded(directory), self.pieces()
        config = self.context(directory).hf_config
        hidden = (config.get("text_config") or config)["hidden_size"]
        answers = self.encode(encoder, pieces)
        assert len(answers) == len(pieces)
        for piece, answer in zip(pieces, answers, strict=True):
            assert len(answer.deep) == encoder.levels
            for states in (answer.states, *answer.deep):
                assert states.shape == (encoder.tokens(piece.item, piece.piece), hidden)
                assert states.dtype == torch.float32
                assert states.device == torch.device("cpu")
                assert states.isfinite().all()

    def test_half_precision(self, directory: Path) -> None:
        expected = self.encode(self.loaded(directory), self.pieces())
        for answer, wide in zip(
            self.encode(self.loaded(directory, torch.bfloat16), self.pieces()), expected, strict=True
        ):
            for states, other in zip((answer.states, *answer.deep), (wide.states, *wide.deep), strict=True):
                assert states.dtype == torch.bfloat16
                # bfloat16 has 8 bits of mantissa; some layers of random weights make a few per cent of that.
                assert float((states - other).norm() / other.norm()) < 0.15

    def test_each_answer_is_its_own(self, directory: Path) -> None:
        """Whatever else is in the list, in whatever order, and how often."""
        encoder, pieces = self.loaded(directory), self.pieces()
        alone = [self.encode(encoder, [piece])[0] for piece in pieces]
        assert self.encode(encoder, []) == []

        @properties(25)
        @given(st.lists(st.integers(0, len(pieces) - 1), max_size=6))
        def check(chosen: list[int]) -> None:
            found = self.encode(encoder, [pieces[index] for index in chosen])
            _assert_close(found, [alone[index] for index in chosen])

        check()

    def test_answers_share_no_memory(self, directory: Path) -> None:
        """The worker keeps answers, drops them one by one, and counts their bytes."""
        encoder, pieces = self.loaded(directory), self.pieces()
        expected = self.encode(encoder, pieces)
        answers = self.encode(encoder, pieces)
        for index, answer in enumerate(answers):
            for states in (answer.states, *answer.deep):
                assert states.untyped_storage().nbytes() <= 2 * states.nbytes, "keeps more memory alive than it has"
                with torch.inference_mode():
                    states.fill_(torch.nan)
            _assert_close(answers[index + 1 :], expected[index + 1 :])
        _assert_close(self.encode(encoder, pieces), expected)

    def test_every_corner_matters(self, directory: Path) -> None:
        """Other pixels in any corner of the first or the last frame make other states."""
        encoder = self.loaded(directory)
        for piece in self.pieces():
            before = self.encode(encoder, [piece])[0]
            height, width = piece.pixels.shape[1] // 2, piece.pixels.shape[2] // 2
            for frame in {0, len(piece.pixels) - 1}:
                for rows in (slice(0, height), slice(height, None)):
                    for columns in (slice(0, width), slice(width, None)):
                        pixels = piece.pixels.copy()
                        pixels[frame, rows, columns] //= 2
                        after = self.encode(encoder, [_with_pixels(piece, pixels)])[0]
                        where = f"frame {frame}, rows {rows}, columns {columns} of {piece.item.kind} {piece.item.shape}"
                        assert _difference([after], [before]) > 10 * TOLERANCE, f"{where} make no difference"

    def test_pieces_see_their_own_frames_alone(self, directory: Path) -> None:
        """Two videos that have one piece in common have one answer in common."""
        encoder = self.loaded(directory)
        videos = [item for item in self.make_items() if item.pieces > 1]
        if not videos:
            pytest.skip("no item has several pieces")
        draw = np.random.default_rng(1)
        for item in videos:
            one, other = (draw.integers(0, 256, item.shape, dtype=np.uint8) for _ in range(2))
            step = item.shape[0] // item.pieces
            for common in range(item.pieces):
                mixed = other.copy()
                mixed[common * step : (common + 1) * step] = one[common * step : (common + 1) * step]
                first, second = self.encode(encoder, pieces_of(item, one)), self.encode(encoder, pieces_of(item, mixed))
                for index in range(item.pieces):
                    difference = _difference([first[index]], [second[index]])
                    assert (difference <= TOLERANCE) == (index == common), f"piece {index}, {common} is in common"

    def test_takes_mapped_files_and_leaves_them(self, directory: Path, tmp_path: Path) -> None:
        """Pixels may be memory that cannot be written to."""
        encoder, pieces = self.loaded(directory), self.pieces()
        expected = self.encode(encoder, [_with_pixels(piece, piece.pixels.copy()) for piece in pieces])
        mapped = []
        for index, piece in enumerate(pieces):
            file = tmp_path / str(index)
            file.write_bytes(piece.pixels.tobytes())
            memory: NDArray[np.uint8] = np.memmap(file, np.uint8, "r", shape=piece.pixels.shape)
            mapped.append(dataclasses.replace(piece, pixels=memory))
        _assert_close(self.encode(encoder, mapped), expected)
        assert all(np.array_equal(one.pixels, other.pixels) for one, other in zip(mapped, pieces, strict=True))


def pieces_of(item: MediaItem, pixels: NDArray[np.uint8]) -> list[MediaPiece]:
    """Return the pieces of an item that has these pixels, whose digest then covers them."""
    step = item.shape[0] // item.pieces
    own = msgspec.structs.replace(item, digest=hashlib.sha256(pixels.tobytes()).digest())
    return [MediaPiece(own, index, pixels[index * step : (index + 1) * step]) for index in range(item.pieces)]


def _assert_refused(encoder: MediaEncoder, item: MediaItem, piece: int) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        raise AssertionError(f"{encoder.tokens(item, piece)} tokens for piece {piece} of {item}")


def _with_pixels(piece: MediaPiece, pixels: NDArray[np.uint8]) -> MediaPiece:
    digest = hashlib.sha256(piece.item.digest + pixels.tobytes()).digest()
    return MediaPiece(msgspec.structs.replace(piece.item, digest=digest), piece.piece, pixels)


def _difference(found: Sequence[MediaStates], expected: Sequence[MediaStates]) -> float:
    """Return the largest difference of any level over the largest number in that level of that answer."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        for states, wanted in zip((one.states, *one.deep), (other.states, *other.deep), strict=True):
            assert states.shape == wanted.shape
            difference = float((states - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))
            worst = max(worst, math.inf if math.isnan(difference) else difference)
    return worst


def _assert_close(found: Sequence[MediaStates], expected: Sequence[MediaStates]) -> None:
    assert len(found) == len(expected)
    difference = _difference(found, expected)
    assert difference <= TOLERANCE, f"states are off by {difference:.3g} relative"


def _some(names: Sequence[str]) -> Sequence[str]:
    """Return a few of many names, spread over all."""
    return names[:: -(-len(names) // _MOST_TENSORS)]


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def _save(directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})


def _item(kind: MediaKind, time: int, rows: int, columns: int) -> MediaItem:
    """Return what the processor of `make_model`'s own model makes of media of so many patches, of 16 pixels each."""
    shape = (1 if kind == "image" else 2 * time, 16 * rows, 16 * columns, 3)
    return MediaItem(kind=kind, digest=b"", file="", shape=shape, grid=(time, rows, columns), pieces=time)
