"""What the suite of MediaProcessor is made from: a model's files, good media, prompts, and checks of what comes out."""

from __future__ import annotations

import hashlib
import io
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st

from pegboard.conformance.suite import ContractSuite
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.options import Options
from pegboard.plugins.media.api import (
    MediaContext,
    MediaItem,
    MediaLayout,
    MediaLimits,
    MediaProcessor,
    MediaShape,
    MediaSource,
    MediaSpan,
)
from pegboard.toolkit.media.inputs import MediaKind, MediaSettings

TEXT = 10_000_000
"""The prompt's own tokens in this suite are this and more, each once; those of `encode` are negative."""
Prompt = Sequence[int | MediaKind]
"""How many tokens of text, or a placeholder of this kind, in order."""


class Recorder(io.BytesIO):
    """A file that knows its largest write."""

    largest = 0

    def write(self, data: Any, /) -> int:
        self.largest = max(self.largest, memoryview(data).nbytes)
        return super().write(data)


def encode(text: str) -> list[int]:
    """Stand in for a tokenizer: an id for each byte."""
    return [-1 - byte for byte in text.encode()]


class ProcessorSuite(ContractSuite):
    """The helpers. What an author overrides is here, too."""

    config: ClassVar[Mapping[str, object]] = {}
    """The config.json of a model that the processor supports."""
    files: ClassVar[Mapping[str, object]] = {}
    """Further files of the model's directory, by name, as JSON values."""
    placeholders: ClassVar[Mapping[MediaKind, int]] = {}
    """The ids of the tokens that its chat templates write for an item, by kind."""

    def media(self, kind: MediaKind) -> Sequence[bytes]:
        """Return good files of this kind, the smaller the better, two at least that differ in size."""
        return ()

    @pytest.fixture
    def ctx(self, tmp_path: Path) -> MediaContext:
        """Return the context of a model directory with `config` and `files` in it."""
        directory = tmp_path / "model"
        directory.mkdir()
        for name, value in {"config.json": dict(self.config), **self.files}.items():
            (directory / name).write_text(json.dumps(value), "utf-8")
        return MediaContext(directory, self.config)

    @pytest.fixture
    def processor(self, ctx: MediaContext) -> MediaProcessor[Options]:
        made: MediaProcessor[Options] = self.build(ctx)
        return made

    @pytest.fixture
    def small(self, ctx: MediaContext) -> MediaProcessor[Options]:
        """Return a processor whose limits let damaged files do little."""
        limits = MediaLimits(max_pixels=2**20, resized_pixels=2**18, max_frames=16, max_seconds=60)
        made: MediaProcessor[Options] = self.build(MediaContext(ctx.directory, ctx.hf_config, limits))
        return made

    def sources(
        self, processor: MediaProcessor[Options], folder: Path, settings: MediaSettings | None = None
    ) -> Iterator[MediaSource]:
        """Yield every good file. Skips the test where the author gives none."""
        found = False
        for kind in sorted(processor.kinds):
            for number, data in enumerate(self.media(kind)):
                found = True
                file = folder / f"secret-name-{kind}-{number}"
                file.write_bytes(data)
                yield MediaSource(kind, file, settings or MediaSettings())
        if not found:
            pytest.skip("override media() with good files of each kind")

    def prepared(self, processor: MediaProcessor[Options], source: MediaSource) -> tuple[MediaShape, bytes]:
        """Prepare an item and check what comes out of it against the contract."""
        out = Recorder()
        shape = processor.prepare(source, out)
        frames, height, width, colours = shape.shape
        assert min(shape.shape) > 0
        assert colours == 3, f"the shape of pixels is (frames, height, width, 3), not {shape.shape}"
        assert len(out.getvalue()) == frames * height * width * 3, "the pixels written do not fill the shape"
        assert out.largest <= height * width * 3, "several frames were written at once"
        assert shape.pieces > 0
        assert frames % shape.pieces == 0, f"{frames} frames do not come to {shape.pieces} pieces of equal size"
        assert len(shape.grid) == 3
        assert min(shape.grid) > 0
        assert all(math.isfinite(one) for one in shape.times)
        return shape, out.getvalue()

    def refuses(self, processor: MediaProcessor[Options], source: MediaSource) -> bool:
        """Return whether an item is refused, and check how. Anything else is checked as what was prepared."""
        try:
            self.prepared(processor, source)
        except InvalidRequest as caught:
            error = caught
        else:
            return False
        assert error.status == 400
        assert len(error.message) > 10, "say what is wrong with it"
        for private in (source.file.name, str(source.file.parent), "secret", str(Path.cwd()), sys.prefix, "/tmp"):
            assert private not in error.message, f"a client is told of this machine: {error.message}"
        return True

    def item(self, processor: MediaProcessor[Options], source: MediaSource) -> MediaItem:
        """Return what becomes of a good file."""
        shape, pixels = self.prepared(processor, source)
        digest = hashlib.blake2b(pixels, digest_size=32).digest()
        return MediaItem(source.kind, digest, "x", shape.shape, shape.grid, shape.pieces, shape.times)

    def items(self, processor: MediaProcessor[Options], folder: Path) -> dict[MediaKind, list[MediaItem]]:
        """Return an item of every good file, by kind."""
        found: dict[MediaKind, list[MediaItem]] = {kind: [] for kind in processor.kinds}
        for source in self.sources(processor, folder):
            found[source.kind].append(self.item(processor, source))
        return found

    def piece_tokens(self, processor: MediaProcessor[Options], source: MediaSource) -> int:
        """Return the tokens of an item's largest piece."""
        ids, items = self.prompt([source.kind], {source.kind: [self.item(processor, source)]})
        return max(span.count for span in processor.lay_out(ids, items, encode).spans)

    def prompt(
        self, order: Prompt, items: Mapping[MediaKind, Sequence[MediaItem]]
    ) -> tuple[list[int], list[MediaItem]]:
        """Return the ids and the items of a prompt."""
        ids: list[int] = []
        chosen: list[MediaItem] = []
        for one in order:
            if isinstance(one, int):
                ids += range(TEXT + len(ids), TEXT + len(ids) + one)
            else:
                ids.append(self.placeholders[one])
                chosen.append(items[one][len(chosen) % len(items[one])])
        return ids, chosen

    def orders(self, processor: MediaProcessor[Options]) -> st.SearchStrategy[list[int | MediaKind]]:
        """Draw prompts: text before, between and after items."""
        return st.lists(st.integers(1, 5) | st.sampled_from(sorted(processor.kinds)), max_size=7)

    def check_layout(self, layout: MediaLayout) -> None:
        """Fail where a layout is none by its types and sizes."""
        length = len(layout.ids)
        assert layout.ids.shape == (length,)
        assert layout.ids.dtype == np.int64
        assert layout.positions.shape == (3, length)
        assert layout.positions.dtype == np.int32
        assert length == 0 or layout.positions.min() >= 0
        assert type(layout.delta) is int
        end = 0
        for span in layout.spans:
            assert isinstance(span, MediaSpan)
            assert span.count > 0, "a piece has a token at least"
            assert end <= span.start, "spans overlap, or are not in order"
            end = span.start + span.count
        assert end <= length, "a span ends after the prompt"
