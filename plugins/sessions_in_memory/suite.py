"""The conformance suite of SessionStore."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.conformance.suite import ContractSuite
from pegboard.core.interfaces.client import AnnotatedPrompt, GenerateRequest, OutputStream
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.sessions_in_memory.api import SessionParams, SessionStore, SessionStoreContext
from pegboard.toolkit.media.inputs import MediaInput, MediaPrompt

ANSWER = "abc"


class Talk:
    """A store with one open session, "s", and an engine that answers "abc" to everything. Tokens are characters."""

    def __init__(self, store: SessionStore) -> None:
        self.store = store
        self.client = FakeEngineClient(("ab", "c"))
        self.store.open("s")

    async def begin(self, prompt: str | MediaPrompt, rid: str = "", **params: object) -> OutputStream:
        """Submit a turn and read nothing of its answer."""
        session = SessionParams.model_validate({"id": "s", **params})
        [stream] = await self.store.submit(self.client, session, [GenerateRequest(prompt=prompt, rid=rid)])
        return stream

    async def ask(self, prompt: str, rid: str = "", **params: object) -> str:
        """Play a whole turn. Return the prompt that the engine has seen, as text."""
        async for _ in await self.begin(prompt, rid, **params):
            pass
        return self.seen

    async def refused(self, prompt: str | MediaPrompt = "x", rid: str = "", **params: object) -> InvalidRequest:
        """Submit a turn that must be refused before the engine hears of it. Return the error."""
        asked = len(self.client.requests)
        with pytest.raises(InvalidRequest) as caught:
            await self.begin(prompt, rid, **params)
        assert len(self.client.requests) == asked, "a refused turn has reached the engine"
        return caught.value

    @property
    def seen(self) -> str:
        prompt = self.client.requests[-1].prompt
        assert not isinstance(prompt, AnnotatedPrompt)
        return prompt if isinstance(prompt, str) else "".join(map(chr, prompt))


class SessionStoreContract(ContractSuite):
    """A turn's prompt is the history and the request's own; history is what was read to its end, and nothing else."""

    contract = "session_store"

    def play(self, scene: Callable[[Talk], Awaitable[None]]) -> None:
        """Run a scene with a fresh store in an event loop."""

        async def run() -> None:
            store: SessionStore = self.build(SessionStoreContext())
            await scene(Talk(store))

        asyncio.run(run())

    def test_a_turn_continues_the_one_before(self) -> None:
        async def scene(talk: Talk) -> None:
            assert await talk.ask("one ") == "one "
            assert await talk.ask("two ") == "one abctwo "
            assert await talk.ask("three") == "one abctwo abcthree"

        self.play(scene)

    def test_sessions_are_apart(self) -> None:
        async def scene(talk: Talk) -> None:
            other = talk.store.open()
            assert other not in ("", "s")
            await talk.ask("mine ")
            assert await talk.ask("yours ", id=other) == "yours "
            assert await talk.ask("more") == "mine abcmore"

        self.play(scene)

    def test_a_named_turn_is_continued_as_a_branch(self) -> None:
        async def scene(talk: Talk) -> None:
            await talk.ask("a", "first")
            await talk.ask("b", "second")
            assert await talk.ask("c", "third") == "aabcbabcc"
            assert await self._branch(talk, "first", "d") == "aabcd"
            assert await self._branch(talk, "second", "e") == "aabcbabce"

        self.play(scene)

    @staticmethod
    async def _branch(talk: Talk, turn: str, prompt: str) -> str:
        [stream] = await talk.store.submit(
            talk.client, SessionParams(id="s", rid=turn), [GenerateRequest(prompt=prompt)]
        )
        async for _ in stream:
            pass
        return talk.seen

    @pytest.mark.parametrize(
        ("params", "prompt"),
        [
            ({"offset": 2}, "abx"),
            ({"offset": -1}, "abcdabx"),
            ({"offset": 0}, "abcdabcx"),
            ({"drop_previous_output": True}, "abcdx"),
            ({"replace": True}, "x"),
        ],
        ids=["offset", "negative offset", "no offset", "drop_previous_output", "replace"],
    )
    def test_history_can_be_cut(self, params: dict[str, object], prompt: str) -> None:
        async def scene(talk: Talk) -> None:
            await talk.ask("abcd")
            assert await talk.ask("x", "", **params) == prompt

        self.play(scene)

    def test_what_was_replaced_is_gone(self) -> None:
        async def scene(talk: Talk) -> None:
            await talk.ask("old", "old")
            await talk.ask("new", "new", replace=True)
            assert await talk.ask("x") == "newabcx"
            with pytest.raises(InvalidRequest) as caught:
                await self._branch(talk, "old", "y")
            assert caught.value.status == 404

        self.play(scene)

    def test_an_answer_that_is_not_read_is_no_history(self) -> None:
        async def scene(talk: Talk) -> None:
            await talk.ask("kept ")
            stream = await talk.begin("lost ")
            await stream.aclose()
            assert await talk.ask("x") == "kept abcx"

        self.play(scene)

    def test_a_refusal_of_the_engine_leaves_the_session_as_it_was(self) -> None:
        async def scene(talk: Talk) -> None:
            await talk.ask("kept ")

            async def refuse(requests: object) -> None:
                raise InvalidRequest("too busy", status=503)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(talk.client, "submit_all", refuse)
                with pytest.raises(InvalidRequest):
                    await talk.begin("lost ", "lost")
            assert await talk.ask("x", "lost") == "kept abcx"

        self.play(scene)

    def test_pictures_are_refused(self) -> None:
        """And leave the session as it was: what it remembers would be placeholders without pictures."""
        pictures = (MediaInput(kind="image", data=b"picture"),)

        async def scene(talk: Talk) -> None:
            for history in ("", "kept "):
                if history:
                    await talk.ask(history, replace=True)
                for base in ("lost", [*b"lost"]):
                    assert (await talk.refused(MediaPrompt(base=base, media=pictures), "again")).status == 400
            assert await talk.ask("x", "again") == "kept abcx"

        self.play(scene)

    def test_a_running_turn_cannot_be_continued(self) -> None:
        async def scene(talk: Talk) -> None:
            await talk.ask("a")
            stream = await talk.begin("b")
            assert (await talk.refused("c")).status == 409
            async for _ in stream:
                pass
            assert await talk.ask("c") == "aabcbabcc"

        self.play(scene)

    def test_what_is_not_there_is_404(self) -> None:
        async def scene(talk: Talk) -> None:
            assert (await talk.refused(id="none")).status == 404
            with pytest.raises(InvalidRequest) as caught:
                await self._branch(talk, "none", "x")
            assert caught.value.status == 404
            with pytest.raises(InvalidRequest) as caught:
                talk.store.close("none")
            assert caught.value.status == 404

        self.play(scene)

    @pytest.mark.parametrize("offset", [8, -8])
    def test_an_offset_beyond_the_history_is_400(self, offset: int) -> None:
        async def scene(talk: Talk) -> None:
            await talk.ask("abcd")
            assert (await talk.refused(offset=offset)).status == 400

        self.play(scene)

    def test_a_turn_is_one_request(self) -> None:
        async def scene(talk: Talk) -> None:
            two = [GenerateRequest(prompt="a"), GenerateRequest(prompt="b")]
            with pytest.raises(InvalidRequest) as caught:
                await talk.store.submit(talk.client, SessionParams(id="s"), two)
            assert caught.value.status == 400
            assert not talk.client.requests
            assert len(await talk.store.submit(talk.client, None, two)) == 2

        self.play(scene)

    def test_an_id_of_a_turn_is_taken_once(self) -> None:
        async def scene(talk: Talk) -> None:
            await talk.ask("a", "same")
            assert (await talk.refused("b", "same")).status == 400

        self.play(scene)

    def test_a_session_is_opened_once_and_closed_once(self) -> None:
        async def scene(talk: Talk) -> None:
            with pytest.raises(InvalidRequest) as caught:
                talk.store.open("s")
            assert caught.value.status == 409
            await talk.ask("old")
            talk.store.close("s")
            assert (await talk.refused()).status == 404
            assert talk.store.open("s") == "s"
            assert await talk.ask("new") == "new"

        self.play(scene)

    def test_a_full_session_says_so(self) -> None:
        async def scene(talk: Talk) -> None:
            small = talk.store.open("small", capacity=6)
            await talk.ask("ab", id=small)
            assert (await talk.refused("abcd", id=small)).status == 400
            assert await talk.ask("abcd", id=small, replace=True) == "abcd"

        self.play(scene)

    def test_a_closed_session_lets_its_turn_end(self) -> None:
        async def scene(talk: Talk) -> None:
            stream = await talk.begin("a")
            talk.store.close("s")
            tokens = [token async for chunk in stream for token in chunk.token_ids]
            assert "".join(map(chr, tokens)) == ANSWER

        self.play(scene)

    def test_figures_are_plain(self) -> None:
        async def scene(talk: Talk) -> None:
            await talk.ask("a")
            assert all(isinstance(value, int | float | str) for value in talk.store.stats().values())

        self.play(scene)
