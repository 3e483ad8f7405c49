"""The conformance suite of MediaProcessor."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.properties import properties
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.options import Options
from pegboard.plugins.media.api import MediaContext, MediaLayout, MediaLimits, MediaProcessor, MediaSource
from pegboard.plugins.media.suite.base import TEXT, Prompt, encode
from pegboard.plugins.media.suite.encoded import EncodedTests
from pegboard.toolkit.media.inputs import MediaKind, MediaSettings

DECODERS = ("torch", "transformers", "PIL", "av", "cv2", "imageio", "decord")


class MediaProcessorContract(EncodedTests):
    """Good media become what the contract says, bad media an error of the request, and prompts keep their text."""

    contract = "media_processor"

    # ---- what it is -------------------------------------------------------------------------------------------------

    def test_a_model_without_media_is_not_supported(self, tmp_path: Path) -> None:
        plain = MediaContext(tmp_path, {"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
        assert self.objection(plain), "it supports a model that takes no media"

    def test_a_missing_library_is_told_apart_from_a_foreign_model(
        self, processor: MediaProcessor[Options], ctx: MediaContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """So that operators are warned where their model would take media."""
        record, cls, options = self.subject.record, type(processor), self.make_options()
        plain = MediaContext(tmp_path, {"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
        for name in record.plugin.extras if record is not None else ():
            with monkeypatch.context() as patch:
                patch.setitem(sys.modules, name, None)
                assert cls.supports(options, plain), f"without {name}, it supports a model that takes no media"
                with contextlib.suppress(ModuleNotFoundError):
                    objection = cls.supports(options, ctx)
                    assert objection is None, (
                        f"without {name}, `supports` must raise ModuleNotFoundError, or return None"
                    )

    def test_kinds_are_known(self, processor: MediaProcessor[Options]) -> None:
        assert processor.kinds
        assert processor.kinds <= {"image", "video"}
        assert isinstance(processor.kinds, frozenset)

    def test_reserved_are_spellings(self, processor: MediaProcessor[Options]) -> None:
        assert isinstance(processor.reserved, frozenset)
        assert processor.reserved
        assert all(one.strip() for one in processor.reserved)

    def test_parts_are_json(self, processor: MediaProcessor[Options]) -> None:
        parts = [dict(processor.part(kind)) for kind in sorted(processor.kinds)]
        assert json.loads(json.dumps(parts)) == parts
        assert all(parts)
        assert len({json.dumps(one, sort_keys=True) for one in parts}) == len(parts), "templates cannot tell its kinds"

    def test_imports_no_decoder(self) -> None:
        """Nor torch: the API process has neither."""
        module = self.provider_class().__module__
        code = f"import sys, {module}; sys.exit(str([one for one in {DECODERS} if one in sys.modules]))"
        done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
        if "ModuleNotFoundError" in done.stderr and module in done.stderr:
            pytest.skip(f"{module} can be imported by the tests only")
        assert done.stderr.strip() == "[]", f"importing {module} imports {done.stderr}"

    # ---- preparing --------------------------------------------------------------------------------------------------

    def test_pixels_fill_the_shape(self, processor: MediaProcessor[Options], tmp_path: Path) -> None:
        shapes: dict[str, set[tuple[int, ...]]] = {}
        for source in self.sources(processor, tmp_path):
            shape, _ = self.prepared(processor, source)
            assert source.kind == "video" or shape.pieces == 1, "a picture is one piece"
            shapes.setdefault(source.kind, set()).add((*shape.shape, *shape.grid))
        assert shapes.keys() == processor.kinds, "override media() with good files of each kind"
        for kind, found in shapes.items():
            assert len(found) > 1, f"media() has no two {kind}s that differ in size"

    def test_preparing_is_deterministic(
        self, processor: MediaProcessor[Options], ctx: MediaContext, tmp_path: Path
    ) -> None:
        for source in self.sources(processor, tmp_path):
            first = self.prepared(processor, source)
            assert self.prepared(processor, source) == first, "prepared again, an item is another"
            assert self.prepared(self.build(ctx), source) == first, "another process prepares it otherwise"

    def test_different_media_differ(self, processor: MediaProcessor[Options], tmp_path: Path) -> None:
        pixels = [self.prepared(processor, source)[1] for source in self.sources(processor, tmp_path)]
        assert len(set(pixels)) == len(pixels)

    def test_files_stay_as_they_are(self, processor: MediaProcessor[Options], tmp_path: Path) -> None:
        for source in self.sources(processor, tmp_path):
            before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
            self.prepared(processor, source)
            assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

    def test_fewer_pixels_where_they_are_asked_for(self, processor: MediaProcessor[Options], tmp_path: Path) -> None:
        usual = [self.prepared(processor, source)[0].shape for source in self.sources(processor, tmp_path)]
        most = min(height * width for _, height, width, _ in usual) // 2 + 1
        for before, source in zip(
            usual, self.sources(processor, tmp_path, MediaSettings(max_pixels=most)), strict=True
        ):
            _, height, width, _ = self.prepared(processor, source)[0].shape
            assert height * width <= before[1] * before[2]

    def test_limits_are_kept(self, ctx: MediaContext, tmp_path: Path) -> None:
        """What cannot be made small enough is refused."""
        for resized, frames in ((2**12, 768), (2**16, 768), (2**24, 2)):
            limits = MediaLimits(resized_pixels=resized, max_frames=frames)
            processor = self.build(MediaContext(ctx.directory, ctx.hf_config, limits))
            for source in self.sources(processor, tmp_path):
                if self.refuses(processor, source):
                    continue
                shape, pixels = self.prepared(processor, source)
                assert len(pixels) <= 3 * resized, f"{len(pixels) // 3} pixels, where {resized} are allowed"
                filled = shape.shape[0] // shape.pieces - 1
                assert shape.shape[0] <= frames + filled, f"{shape.shape[0]} frames, where {frames} are allowed"

    def test_pieces_have_few_tokens(self, ctx: MediaContext, tmp_path: Path) -> None:
        usual = self.build(ctx)
        sizes = [self.piece_tokens(usual, source) for source in self.sources(usual, tmp_path)]
        for most in {1, max(sizes) - 1, max(sizes)} - {0}:
            processor = self.build(MediaContext(ctx.directory, ctx.hf_config, MediaLimits(piece_tokens=most)))
            for size, source in zip(sizes, self.sources(processor, tmp_path), strict=True):
                if size <= most or not self.refuses(processor, source):
                    found = self.piece_tokens(processor, source)
                    assert found <= most, f"a piece of {found} tokens, where {most} are allowed"

    def test_large_sources_are_refused(self, ctx: MediaContext, tmp_path: Path) -> None:
        processor = self.build(MediaContext(ctx.directory, ctx.hf_config, MediaLimits(max_pixels=1)))
        for source in self.sources(processor, tmp_path):
            assert self.refuses(processor, source), "a source of more pixels than allowed was prepared"

    def test_what_is_no_media_is_refused(self, small: MediaProcessor[Options], tmp_path: Path) -> None:
        noise = hashlib.shake_256(b"").digest(5000)
        for data in (b"", b"\0", noise, b"\0" * 5000, b"some text\n" * 99, b"<html></html>", b"%PDF-1.7\n" + noise):
            for kind in sorted(small.kinds):
                file = tmp_path / "secret-name"
                file.write_bytes(data)
                assert self.refuses(small, MediaSource(kind, file)), f"{data[:20]!r} was prepared as {kind}"

    def test_truncated_pictures_are_refused(self, small: MediaProcessor[Options], tmp_path: Path) -> None:
        for source in self.sources(small, tmp_path):
            if source.kind == "image":
                data = source.file.read_bytes()
                for length in (1, len(data) // 10, len(data) // 2):
                    source.file.write_bytes(data[:length])
                    assert self.refuses(small, source), f"the first {length} of {len(data)} bytes were prepared"

    def test_damaged_media_raise_nothing_else(self, small: MediaProcessor[Options], tmp_path: Path) -> None:
        """They are refused, or prepared as if they were good."""
        sources = [(source, source.file.read_bytes()) for source in self.sources(small, tmp_path)]

        @properties(100)
        @given(st.data())
        def check(data: st.DataObject) -> None:
            source, whole = data.draw(st.sampled_from(sources))
            broken = bytearray(whole)
            for at, value in data.draw(
                st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), max_size=8)
            ):
                broken[at] = value
            source.file.write_bytes(
                broken[: data.draw(st.integers(0, len(whole)))] if data.draw(st.booleans()) else broken
            )
            self.refuses(small, source)

        check()

    def test_any_file_has_a_number_of_expected_pixels(self, processor: MediaProcessor[Options], tmp_path: Path) -> None:
        """Also one that is damaged: the server asks before it is prepared."""
        for source in self.sources(processor, tmp_path):
            whole = source.file.read_bytes()
            for data in (whole, whole[: len(whole) // 2], whole[:3], b"no media at all"):
                source.file.write_bytes(data)
                found = processor.expected_pixels(source)
                assert isinstance(found, int), f"expected_pixels returned {found!r}"
                assert found >= 0, f"expected_pixels returned {found}"

    # ---- laying out -------------------------------------------------------------------------------------------------

    def test_text_stays_as_it_is(self, processor: MediaProcessor[Options]) -> None:
        for length in (0, 1, 50):
            ids, _ = self.prompt([length], {})
            layout = processor.lay_out(ids, [], encode)
            self.check_layout(layout)
            assert layout.ids.tolist() == ids
            assert layout.positions.tolist() == [list(range(length))] * 3
            assert (layout.spans, layout.delta) == ((), 0)

    def test_layouts_are_whole(self, processor: MediaProcessor[Options], tmp_path: Path) -> None:
        """Every piece has its span, and the prompt's own tokens stay in their order."""
        items = self.items(processor, tmp_path)

        @properties(40)
        @given(self.orders(processor))
        def check(order: Prompt) -> None:
            ids, chosen = self.prompt(order, items)
            layout = processor.lay_out(ids, chosen, encode)
            self.check_layout(layout)
            pieces = [(index, piece) for index, item in enumerate(chosen) for piece in range(item.pieces)]
            assert [(span.item, span.piece) for span in layout.spans] == pieces, "each piece once, in order"
            covered = np.zeros(len(layout.ids), bool)
            for span in layout.spans:
                covered[span.start : span.start + span.count] = True
            outside = layout.ids[~covered]
            assert outside[outside >= TEXT].tolist() == [one for one in ids if one >= TEXT], "text was lost or moved"
            assert not (layout.ids[covered] >= TEXT).any(), "a span covers text"

        check()

    def test_what_follows_changes_nothing_before_it(self, processor: MediaProcessor[Options], tmp_path: Path) -> None:
        """So that prompts with a common beginning have its tokens and positions in common."""
        items = self.items(processor, tmp_path)

        @properties(40)
        @given(self.orders(processor), self.orders(processor))
        def check(first: list[int | MediaKind], second: list[int | MediaKind]) -> None:
            ids, chosen = self.prompt([1, *first], items)
            short = processor.lay_out(ids, chosen, encode)
            more, others = self.prompt([1, *first, *second], items)
            long = processor.lay_out(more, others, encode)
            length = len(short.ids)
            assert long.ids[:length].tolist() == short.ids.tolist()
            assert np.array_equal(long.positions[:, :length], short.positions)
            assert long.spans[: len(short.spans)] == short.spans

        check()

    def test_positions_go_on_after_the_prompt(self, processor: MediaProcessor[Options], tmp_path: Path) -> None:
        items = self.items(processor, tmp_path)
        for kind in sorted(processor.kinds):
            for tail in (0, 3):
                ids, chosen = self.prompt([2, kind, tail], items)
                layout = processor.lay_out(ids, chosen, encode)
                following = len(layout.ids) + layout.delta
                assert following > layout.positions[:, -1].max(), "the first output token is at a position before it"
                assert following <= max(int(layout.positions.max()) + 1, len(layout.ids))

    def test_laying_out_is_pure(self, processor: MediaProcessor[Options], ctx: MediaContext, tmp_path: Path) -> None:
        items = self.items(processor, tmp_path)
        kinds = sorted(processor.kinds)
        ids, chosen = self.prompt([3, *kinds, 2, *kinds, 1], items)
        before = (list(ids), list(chosen))
        layouts = [one.lay_out(ids, chosen, encode) for one in (processor, processor, self.build(ctx))]
        assert (ids, chosen) == before, "it changes what it is given"
        assert len({layout_text(one) for one in layouts}) == 1, "laid out again, a prompt is another"

    def test_a_mismatch_is_refused(self, processor: MediaProcessor[Options], tmp_path: Path) -> None:
        items = self.items(processor, tmp_path)
        kinds = sorted(processor.kinds)
        for kind in kinds:
            ids, chosen = self.prompt([2, kind, 2, kind], items)
            wrong = [chosen[:1], [], [*chosen, chosen[0]]]
            wrong += [[items[other][0]] * 2 for other in kinds if other != kind]
            for given_items in wrong:
                with pytest.raises(InvalidRequest) as caught:
                    processor.lay_out(ids, given_items, encode)
                assert caught.value.status == 400
                # It may leave that to lay_out.
                with contextlib.suppress(InvalidRequest):
                    processor.check_places(ids, [item.kind for item in given_items])
            processor.check_places(ids, [item.kind for item in chosen])
        if len(kinds) > 1:
            ids, chosen = self.prompt([2, *kinds], items)
            with pytest.raises(InvalidRequest):
                processor.lay_out(ids, chosen[::-1], encode)


def layout_text(layout: MediaLayout) -> str:
    """Return all of a layout as text, to compare it."""
    return repr((layout.ids.tolist(), layout.spans, layout.positions.tolist(), layout.delta))
