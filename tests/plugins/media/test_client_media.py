"""Media in the engine client: their files are there for as long as a request needs them, whatever way it ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.conformance.rig.media_toy import TOKENS, ToyProcessor
from pegboard.core.frontend.features import Features
from pegboard.core.interfaces.client import EmbedRequest, GenerateRequest, ModelInfo, OutputStream
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.frontend import FrontendStage
from pegboard.core.interfaces.messages import AbortRequest, Accepted, Rejected, TokenizedRequest
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.server.client import AsyncEngineClient
from pegboard.plugins.media.api import MediaContext
from pegboard.plugins.media.frontend.layout import Layouts
from pegboard.plugins.media.frontend.prepare import Preparer
from pegboard.plugins.media.frontend.prompts import MediaFrontend
from pegboard.plugins.media.work import NAME
from pegboard.toolkit.media.inputs import MediaInput, MediaPrompt
from pegboard.toolkit.media.service import MediaService, reader_of
from pegboard.toolkit.text.tokenizer import Tokenizer
from tests.core.server.client_scene import END, Wire, settle, tokens
from tests.fakes.toy_media import ppm, toy_settings
from tests.plugins.media.frontend.scene import files, picture, preparing, toy_model
from tests.plugins.media.media_harness import media_in

IMAGE = TOKENS[1]
INFO = dataclasses.replace(
    FakeEngineClient().info, max_context_len=2000, max_total_tokens=2000, vocab_size=328, features=("media.image",)
)
PICTURES = [ppm(picture(8, 8 * (seed + 1), seed)) for seed in range(3)]
BAD = b"not a picture"


@contextlib.contextmanager
def frontend(path: Path) -> Iterator[tuple[MediaFrontend, Tokenizer]]:
    tokenizer = Tokenizer.from_directory(toy_model(path / "model"))
    with preparing(path) as preparer:
        toy = ToyProcessor(NoOptions(), MediaContext(path, {"toy_media": toy_settings()}))
        yield MediaFrontend(preparer, Layouts(toy, tokenizer), frozenset(), 4), tokenizer


def asking(*pictures: bytes, rid: str = "", **more: Any) -> GenerateRequest:
    media = tuple(MediaInput(kind="image", data=one, place=f"media.{i}") for i, one in enumerate(pictures))
    prompt = MediaPrompt(base="a" + IMAGE * len(pictures), media=media)
    return GenerateRequest(prompt=prompt, rid=rid, add_special_tokens=False, **more)


def sent(wire: Wire) -> list[TokenizedRequest]:
    return [one for message in wire.sent for one in getattr(message, "requests", [message]) if hasattr(one, "sampling")]


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.001)


class Given(FrontendStage):
    """The stage with what prepares media made before."""

    name = NAME

    def __init__(self, media: MediaFrontend) -> None:
        self.media = media

    def expander(self, info: ModelInfo) -> MediaFrontend | None:
        return self.media.with_features(info.features)

    def service(self, info: ModelInfo) -> MediaService | None:
        found = self.expander(info)
        return None if found is None else MediaService(found.processor, found.figures)

    def figures(self, info: ModelInfo) -> Mapping[str, object]:
        found = self.expander(info)
        return {} if found is None else found.figures()


class Scene:
    """A client whose wire's other end is the test."""

    def __init__(self, media: MediaFrontend, tokenizer: Tokenizer) -> None:
        self.client = AsyncEngineClient(INFO, tokenizer, features=Features([Given(media)]))
        self.preparer: Preparer = media.preparer
        self.wire = Wire()

    def attach(self, info: ModelInfo = INFO) -> None:
        self.wire = Wire()
        self.client.attach(self.wire, info)  # type: ignore[arg-type]

    async def submitted(self, *requests: GenerateRequest) -> list[OutputStream]:
        before = len(sent(self.wire))
        task = asyncio.ensure_future(self.client.submit_all(requests))
        await until(lambda: len(sent(self.wire)) == before + len(requests) or task.done())
        await self.wire.say(*(Accepted(rid=one.rid) for one in sent(self.wire)[before:]))
        return await task

    @property
    def files(self) -> list[str]:
        return files(self.preparer)


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Callable[[Callable[[Scene], Awaitable[None]]], None]]:
    with frontend(tmp_path) as (media, tokenizer):

        async def whole(scene: Callable[[Scene], Awaitable[None]]) -> None:
            stage = Scene(media, tokenizer)
            stage.attach()
            async with asyncio.timeout(60):
                await scene(stage)
            stage.client.detach("the test is over")
            assert (stage.files, media.preparer.store.bytes, media.preparer.open) == ([], 0, 0)

        yield lambda scene: asyncio.run(whole(scene))


Play = Callable[[Callable[[Scene], Awaitable[None]]], None]


def test_what_is_sent_and_told(play: Play) -> None:
    async def scene(stage: Scene) -> None:
        assert isinstance(reader_of(stage.client), ToyProcessor)
        first, second = await stage.submitted(*[asking(PICTURES[1], PICTURES[0])] * 2)
        messages = sent(stage.wire)
        media = media_in(messages[0].features)
        assert media is not None
        assert media == media_in(messages[1].features)
        assert sorted(item.file for item in media.items) == stage.files
        assert [item.shape for item in media.items] == [(1, 8, 16, 3), (1, 8, 8, 3)]
        assert len(media.positions) == 3 * len(messages[0].prompt) == 3 * 4 * 4
        assert first.item_tokens == second.item_tokens == {"image": 3}
        text = (await stage.submitted(GenerateRequest(prompt="abc")))[0]
        assert text.item_tokens == {}
        assert not sent(stage.wire)[2].features
        info = asyncio.ensure_future(stage.client.server_info())
        await settle()
        stage.client.detach("over")
        with pytest.raises(InvalidRequest):
            await info

    play(scene)


def test_counting(play: Play) -> None:
    async def scene(stage: Scene) -> None:
        prompt = asking(PICTURES[0], PICTURES[2]).prompt
        assert await stage.client.count_tokens(prompt, add_special_tokens=False) == 5
        assert await stage.client.count_tokens("abc", add_special_tokens=False) == 3
        assert await stage.client.count_tokens([1, 2]) == 2
        assert stage.files == []

    play(scene)


def test_refused_before_it_leaves(play: Play) -> None:
    async def scene(stage: Scene) -> None:
        for request, code in [
            (asking(PICTURES[0], BAD), "invalid_media"),
            (asking(*PICTURES, *PICTURES), "too_many_media"),
            (GenerateRequest(prompt=f"a{IMAGE}"), "media_mismatch"),
            (asking(PICTURES[0], logprobs=1000), "invalid_request"),
        ]:
            with pytest.raises(InvalidRequest) as caught:
                await stage.client.submit_all([request, GenerateRequest(prompt="abc")])
            assert (caught.value.status, caught.value.code) == (400, code)
        with pytest.raises(InvalidRequest):
            await stage.client.embed(
                [msgspec.structs.replace(EmbedRequest(prompt=""), prompt=asking(PICTURES[0]).prompt)]
            )
        assert stage.wire.sent == []
        assert stage.files == []

    play(scene)


def test_an_engine_that_encodes_nothing(play: Play) -> None:
    """The processor alone is not enough, and what is asked of it is refused like by a text model."""

    async def scene(stage: Scene) -> None:
        stage.attach(dataclasses.replace(INFO, features=()))
        assert reader_of(stage.client) is None
        with pytest.raises(InvalidRequest) as caught:
            await stage.client.submit(asking(PICTURES[0]))
        assert caught.value.code == "unsupported"
        stage.attach()
        assert reader_of(stage.client) is not None

    play(scene)


def test_files_stay_until_the_scheduler_has_let_go(play: Play) -> None:
    """Later than a client that leaves: what an abort has not reached yet may still read them."""

    async def scene(stage: Scene) -> None:
        [stream] = await stage.submitted(asking(PICTURES[0], rid="r"))
        await stream.aclose()
        await settle()
        assert stage.wire.sent[-1] == AbortRequest(rid="r")
        assert len(stage.files) == 1
        await stage.wire.say(tokens("r", "", {"type": "abort"}))
        assert stage.files == []

    play(scene)


class Ends(RuleBasedStateMachine):
    """Requests with media that begin, share pictures, and end in every order and way. A file is there if and only if a
    request that the scheduler has not let go needs it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.stack = contextlib.ExitStack()
        media, tokenizer = self.stack.enter_context(frontend(self.path))
        self.loop = asyncio.new_event_loop()
        self.stage = Scene(media, tokenizer)
        self.live: dict[str, set[str]] = {}
        """Files of each request that the scheduler has."""
        self.streams: dict[str, OutputStream] = {}
        self.number = 0
        self.run(self._attach())

    def run(self, work: Awaitable[None]) -> None:
        self.loop.run_until_complete(asyncio.wait_for(work, 60))

    async def _attach(self) -> None:
        self.stage.attach()

    def _requests(self, which: list[int], answers: int) -> list[GenerateRequest]:
        self.number += 1
        one = asking(*(PICTURES[i] for i in which))
        return [
            GenerateRequest(prompt=one.prompt, rid=f"{self.number}.{i}", add_special_tokens=False)
            for i in range(answers)
        ]

    @rule(which=st.lists(st.integers(0, 2), max_size=3), answers=st.integers(1, 3), accept=st.booleans())
    def submit(self, which: list[int], answers: int, accept: bool) -> None:
        async def work() -> None:
            before = len(sent(self.stage.wire))
            task = asyncio.ensure_future(self.stage.client.submit_all(self._requests(which, answers)))
            await until(lambda: len(sent(self.stage.wire)) == before + answers)
            new = sent(self.stage.wire)[before:]
            for one in new:
                media = media_in(one.features)
                items = media.items if media is not None else ()
                assert len(items) == len(which)
                assert len({item.file for item in items}) == len(set(which))
                self.live[one.rid] = {item.file for item in items}
            if accept:
                await self.stage.wire.say(*(Accepted(rid=one.rid) for one in new))
                self.streams.update({stream.rid: stream for stream in await task})
                return
            # One is refused: the others are aborted, and end when the scheduler says so.
            await self.stage.wire.say(Rejected(rid=new[0].rid, status=503, code="queue_full", message="later"))
            del self.live[new[0].rid]
            with pytest.raises(InvalidRequest):
                await task

        self.run(work())

    @rule(bad=st.booleans(), turns=st.integers(0, 6))
    def submit_in_vain(self, bad: bool, turns: int) -> None:
        async def work() -> None:
            before = len(sent(self.stage.wire))
            task = asyncio.ensure_future(self.stage.client.submit(asking(PICTURES[0], BAD if bad else PICTURES[2])))
            for _ in range(turns):
                await asyncio.sleep(0.001)
            if not bad:
                task.cancel()
            with contextlib.suppress(InvalidRequest, asyncio.CancelledError):
                await task
            # One that has left all the same is the scheduler's until that says otherwise.
            for one in sent(self.stage.wire)[before:]:
                media = media_in(one.features)
                assert media is not None
                self.live[one.rid] = {item.file for item in media.items}

        self.run(work())

    @precondition(lambda self: self.live)
    @rule(data=st.data(), reason=st.sampled_from([END, {"type": "abort", "status": 500, "message": "failed"}]))
    def end(self, data: st.DataObject, reason: dict[str, Any]) -> None:
        rid = data.draw(st.sampled_from(sorted(self.live)))
        self.run(self.stage.wire.say(tokens(rid, "a"), tokens(rid, "b", reason)))
        del self.live[rid]
        self.streams.pop(rid, None)

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.run(self.streams.pop(data.draw(st.sampled_from(sorted(self.streams)))).aclose())

    @rule()
    def scheduler_dies(self) -> None:
        async def work() -> None:
            self.stage.client.detach("it died")
            self.stage.attach()

        self.run(work())
        self.live.clear()
        self.streams.clear()

    @rule()
    def helper_dies(self) -> None:
        for pid in self.stage.preparer.pool.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @invariant()
    def files_are_those_of_live_requests(self) -> None:
        needed = set().union(*self.live.values()) if self.live else set()
        # A thread that was about to make a file when its request went removes it again.
        self.run(until(lambda: set(self.stage.files) == needed))
        sizes = [(self.stage.preparer.store.directory / name).stat().st_size for name in needed]
        assert self.stage.preparer.store.bytes == sum(sizes)
        assert self.stage.preparer.open == 0

    def teardown(self) -> None:
        async def work() -> None:
            self.stage.client.detach("the test is over")
            await until(lambda: not self.stage.files)

        try:
            self.run(work())
        finally:
            self.loop.close()
            self.stack.close()
            shutil.rmtree(self.path)


TestEnds = Ends.TestCase
TestEnds.settings = settings(
    max_examples=6, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
