"""Requests with media come, are aborted, retracted and finished in any order, on an encoder cache that is too small."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pegboard.core.interfaces.messages import AbortRequest
from tests.plugins.media.media_harness import Album, Prompt, books_of, media_harness, model_of, submit

SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"chunk": 7, "loop": "overlap"},
    {"chunk": 16, "page_size": 16, "mixed_chunk": True, "cache": "block"},
    {"chunk": 8, "split_prefill_layers": 2, "loop": "overlap"},
    {"chunk": 5, "cache": "none"},
)
PIECES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 1, 2])), max_size=3
)


class MediaMachine(RuleBasedStateMachine):
    """The encoder cache has 18 tokens: two of the largest pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.album = Album(Path(self.folder.name))
        self.asked: dict[str, Prompt] = {}
        self.aborted: set[str] = set()

    @initialize(setting=st.sampled_from(SETTINGS))
    def start(self, setting: dict[str, Any]) -> None:
        tight = {"tokens": 128, "max_context_len": 128, "max_running_requests": 5, "new_token_ratio": 0.01}
        capacity = 18 if setting.get("page_size", 1) == 1 else 64
        self.harness = media_harness(self.album.directory, capacity=capacity, encode_tokens=9, **{**tight, **setting})

    @rule(pieces=PIECES, words=st.integers(1, 6), tokens=st.integers(1, 20))
    def ask(self, pieces: list[tuple[int, int, int, int]], words: int, tokens: int) -> None:
        rid = f"{len(self.asked)}"
        parts = [part for one in pieces for part in (self.album.words(words - 1), self.album.item(*one))]
        prompt = self.asked[rid] = self.album.prompt(*parts, self.album.words(words))
        submit(self.harness, rid, prompt, tokens)
        self.album.counts[rid] = tokens

    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        alive = list(self.harness.scheduler.requests.alive)
        if alive:
            rid = alive[which % len(alive)]
            self.aborted.add(rid)
            self.harness.scheduler.receive([AbortRequest(rid=rid)])
            for item in self.asked[rid].media.items:
                (self.album.directory / item.file).unlink(missing_ok=True)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "harness"):
            books = books_of(self.harness)
            assert books.used <= books.capacity
            assert all(key in books for key in books.held)

    def teardown(self) -> None:
        try:
            if hasattr(self, "harness"):
                self._finish()
        finally:
            self.folder.cleanup()

    def _finish(self) -> None:
        self.harness.run()
        model, books = model_of(self.harness), books_of(self.harness)
        assert not books.held
        assert len(model.encoded) == len(books)
        assert all(key in books for key in model.encoded)
        for rid, prompt in self.asked.items():
            expected = prompt.answer(self.album.counts[rid])
            got = self.harness.tokens(rid)
            assert got == (expected[: len(got)] if rid in self.aborted else expected)


TestMedia = MediaMachine.TestCase
TestMedia.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
