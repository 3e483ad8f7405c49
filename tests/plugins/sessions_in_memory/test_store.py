"""Sessions: which tokens a turn is asked with, what becomes history, and what does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.conformance.fake_client import FakeEngineClient, FakeTokenizer
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.sessions_in_memory.api import NoSessions, SessionParams, SessionStoreContext
from pegboard.plugins.sessions_in_memory.options import SessionStoreOptions
from pegboard.plugins.sessions_in_memory.store import InMemorySessions
from pegboard.toolkit.http.generation import Answers

BOS = "\x02"
SCRIPT = ("ab", "c")


class WithBos(FakeTokenizer):
    """Begins every prompt with a token, as many models want it."""

    def __init__(self) -> None:
        super().__init__()
        self.named_tokens = {**self.named_tokens, "bos_token": BOS}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return super().encode((BOS if add_special_tokens else "") + text)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Talk:
    """A store with one open session, "s", and an engine that answers "abc" to everything."""

    def __init__(self, *, tokenizer: FakeTokenizer | None = None, **limits: Any) -> None:
        self.client = FakeEngineClient(SCRIPT, tokenizer=tokenizer)
        self.clock = Clock()
        self.store = InMemorySessions(SessionStoreOptions(**limits), SessionStoreContext(self.clock))
        self.store.open("s")

    async def begin(self, prompt: str | list[int], *, own_rid: str = "", **params: Any) -> Answers:
        request = GenerateRequest(prompt=prompt, rid=own_rid)
        return Answers(await self.store.submit(self.client, SessionParams(id="s", **params), [request]))

    async def ask(self, prompt: str | list[int], *, own_rid: str = "", **params: Any) -> str:
        """A whole turn; the prompt that the engine has seen, as text."""
        answers = await self.begin(prompt, own_rid=own_rid, **params)
        await answers.collect()
        return self.seen

    async def refused(self, prompt: str | list[int], *, own_rid: str = "", **params: Any) -> InvalidRequest:
        asked = len(self.client.requests)
        with pytest.raises(InvalidRequest) as caught:
            await self.begin(prompt, own_rid=own_rid, **params)
        assert len(self.client.requests) == asked
        return caught.value

    @property
    def seen(self) -> str:
        return "".join(map(chr, self.client.requests[-1].prompt))  # type: ignore[arg-type]


def played(scene: Callable[[Talk], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def play() -> None:
        await scene(Talk(**settings))

    asyncio.run(play())


# ---- what a turn is asked with --------------------------------------------------------------------------------------


def test_prompts_and_answers_are_the_history() -> None:
    async def scene(talk: Talk) -> None:
        assert await talk.ask("one ") == "one "
        assert await talk.ask(" two ") == "one abc two "
        assert await talk.ask([33]) == "one abc two abc!"
        request = talk.client.requests[-1]
        assert isinstance(request.prompt, list)
        assert not request.add_special_tokens

    played(scene)


def test_a_prompt_begins_once() -> None:
    async def scene(talk: Talk) -> None:
        assert await talk.ask("one") == f"{BOS}one"
        assert await talk.ask("two") == f"{BOS}oneabctwo"
        assert await talk.ask(f"{BOS}three") == f"{BOS}oneabctwoabcthree"
        assert await talk.ask([ord(BOS), 33]) == f"{BOS}oneabctwoabcthreeabc!"
        assert await talk.ask("x", offset=1) == f"{BOS}x"
        assert await talk.ask(BOS, rid=talk.client.requests[0].rid) == f"{BOS}oneabc"
        assert await talk.ask("new", replace=True) == f"{BOS}new"

    played(scene, tokenizer=WithBos())


def test_long_texts_are_tokenised_alike() -> None:
    async def scene(talk: Talk) -> None:
        long = "word " * 2000
        await talk.ask(long)
        assert await talk.ask(long) == f"{BOS}{long}abc{long}"

    played(scene, tokenizer=WithBos())


def test_a_text_that_cannot_fit_is_not_even_tokenised() -> None:
    async def scene(talk: Talk) -> None:
        await talk.ask("1")
        talk.client.tokenizer.encode = None  # type: ignore[method-assign,assignment]
        error = await talk.refused("x" * (4096 * 256 + 1))
        assert (error.status, error.param, error.code) == (400, "prompt", "context_length_exceeded")
        del talk.client.tokenizer.encode
        assert await talk.ask("2") == "1abc2"

    played(scene, max_session_tokens=10**9)


def test_branches_and_the_last_turn() -> None:
    async def scene(talk: Talk) -> None:
        await talk.ask("1", own_rid="first")
        await talk.ask("2", own_rid="second")
        assert await talk.ask("3", rid="first", own_rid="third") == "1abc3"
        assert await talk.ask("4") == "1abc3abc4", "the last turn is the one that ended last"
        assert await talk.ask("5", rid="second") == "1abc2abc5"

    played(scene)


@pytest.mark.parametrize(
    ("params", "prompt"),
    [
        ({"offset": 0}, "12abc"),
        ({"offset": 1}, "1"),
        ({"offset": 5}, "12abc"),
        ({"offset": -1}, "12ab"),
        ({"offset": -5}, ""),
        ({"drop_previous_output": True}, "12"),
        ({"drop_previous_output": True, "offset": -1}, "1"),
        ({"drop_previous_output": True, "offset": 2}, "12"),
        ({"drop_previous_output": None, "replace": False, "rid": ""}, "12abc"),
    ],
)
def test_the_history_can_be_cut(params: dict[str, Any], prompt: str) -> None:
    async def scene(talk: Talk) -> None:
        await talk.ask("12")
        assert await talk.ask("x", **params) == f"{prompt}x"
        assert await talk.ask("y") == f"{prompt}xabcy"

    played(scene)


@pytest.mark.parametrize(
    ("params", "low", "high"),
    [({"offset": 6}, -5, 5), ({"offset": -6}, -5, 5), ({"offset": 3, "drop_previous_output": True}, -2, 2)],
)
def test_an_offset_beyond_the_history_is_refused(params: dict[str, Any], low: int, high: int) -> None:
    async def scene(talk: Talk) -> None:
        await talk.ask("12")
        error = await talk.refused("x", **params)
        assert (error.status, error.param) == (400, "session_params.offset")
        assert f"from {low} to {high}" in error.message
        assert await talk.ask("x") == "12abcx"

    played(scene)


def test_an_offset_into_an_empty_session_is_refused() -> None:
    async def scene(talk: Talk) -> None:
        assert (await talk.refused("x", offset=1)).param == "session_params.offset"

    played(scene)


def test_replacing_removes_what_followed() -> None:
    async def scene(talk: Talk) -> None:
        await talk.ask("1", own_rid="a")
        await talk.ask("2", rid="a", own_rid="b")
        await talk.ask("3", rid="b", own_rid="c")
        await talk.ask("4", rid="a", own_rid="d")
        assert await talk.ask("5", rid="a", replace=True, own_rid="e") == "1abc5"
        for gone in "bcd":
            error = await talk.refused("x", rid=gone)
            assert (error.status, error.param, error.code) == (404, "session_params.rid", "turn_not_found")
        assert await talk.ask("6") == "1abc5abc6"
        assert await talk.ask("7", rid="a") == "1abc7"

    played(scene)


def test_replacing_without_a_turn_begins_anew() -> None:
    async def scene(talk: Talk) -> None:
        await talk.ask("1", own_rid="a")
        await talk.ask("2", own_rid="b")
        assert await talk.ask("3", replace=True) == "3"
        assert (await talk.refused("x", rid="a")).status == 404
        assert await talk.ask("4") == "3abc4"
        assert talk.store.stats()["tokens"] == len("3abc4abc")

    played(scene)


# ---- what leaves a session as it was --------------------------------------------------------------------------------


class Ends:
    """Ways in which a turn can end without becoming history. Each leaves the store with a turn that was begun."""

    @staticmethod
    async def client_leaves_a_stream(talk: Talk) -> None:
        """sglang 36475: the next turn saw an answer that nobody got, or none of the history."""
        talk.client.stall_at = 1
        answers = await talk.begin("lost")
        async for _ in answers.chunks():
            break
        await answers.aclose()

    @staticmethod
    async def client_leaves_before_the_first_token(talk: Talk) -> None:
        await (await talk.begin("lost")).aclose()

    @staticmethod
    async def client_leaves_while_all_is_collected(talk: Talk) -> None:
        talk.client.stall_at = 1
        answers = await talk.begin("lost")
        task = asyncio.ensure_future(answers.collect())
        while not answers.answers[0].text:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    @staticmethod
    async def client_leaves_before_it_is_accepted(talk: Talk) -> None:
        talk.client.accepting.clear()
        task = asyncio.ensure_future(talk.begin("lost"))
        await talk.client.submitted.wait()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        talk.client.accepting.set()

    @staticmethod
    async def engine_fails(talk: Talk) -> None:
        talk.client.fail_at = 1
        with pytest.raises(InvalidRequest):
            await (await talk.begin("lost")).collect()

    @staticmethod
    async def engine_refuses(talk: Talk) -> None:
        talk.client.refuse = InvalidRequest("no", status=429)
        with pytest.raises(InvalidRequest):
            await talk.begin("lost")

    @staticmethod
    async def it_is_aborted(talk: Talk) -> None:
        talk.client.finish_reason = {"type": "abort", "status": 499, "message": "aborted by the client"}
        await (await talk.begin("lost")).collect()


ENDS = [name for name in vars(Ends) if not name.startswith("_")]


@pytest.mark.parametrize("params", [{}, {"replace": True}, {"rid": "first", "replace": True}])
@pytest.mark.parametrize("end", ENDS)
def test_36475_a_turn_that_does_not_end_well_leaves_its_session_as_it_was(end: str, params: dict[str, Any]) -> None:
    async def scene(talk: Talk) -> None:
        await talk.ask("1", own_rid="first")
        await talk.ask("2", own_rid="second")
        before = talk.store.stats()
        plain = talk.begin
        talk.begin = lambda prompt, **more: plain(prompt, own_rid="lost", **params)  # type: ignore[method-assign]
        await getattr(Ends, end)(talk)
        talk.begin = plain  # type: ignore[method-assign]
        client = talk.client
        client.stall_at = client.fail_at = client.refuse = None
        client.finish_reason = {"type": "stop", "matched": 3}
        assert talk.store.stats() == before
        assert await talk.ask("3", own_rid="lost") == "1abc2abc3", "its id is free again, too"
        assert await talk.ask("4", rid="second") == "1abc2abc4"

    played(scene)


def test_an_answer_that_was_read_to_its_end_is_history_whatever_comes_then() -> None:
    async def scene(talk: Talk) -> None:
        answers = await talk.begin("1")
        async for _, chunk in answers.chunks():
            if chunk.finish_reason is not None:
                break
        await answers.aclose()
        assert await talk.ask("2") == "1abc2"

    played(scene)


# ---- turns side by side ---------------------------------------------------------------------------------------------


def test_one_turn_at_a_time_continues_the_last() -> None:
    async def scene(talk: Talk) -> None:
        await talk.ask("1", own_rid="a")
        running = await talk.begin("2", own_rid="b")
        for params in ({}, {"rid": "b"}, {"replace": True}, {"rid": "a", "replace": True}):
            error = await talk.refused("x", **params)
            assert (error.status, error.code) == (409, "session_busy")
        assert (await talk.refused("x", rid="a", own_rid="b")).code == "duplicate_rid"
        await running.collect()
        assert (await talk.refused("x", own_rid="b")).code == "duplicate_rid"
        assert await talk.ask("3") == "1abc2abc3"

    played(scene)


def test_branches_run_side_by_side() -> None:
    async def scene(talk: Talk) -> None:
        await talk.ask("1", own_rid="a")
        left = await talk.begin("2", rid="a", own_rid="left")
        right = await talk.begin("3", rid="a", own_rid="right")
        assert (await talk.refused("x")).status == 409, "which of them is the last?"
        await right.collect()
        await left.collect()
        assert await talk.ask("4") == "1abc2abc4"
        assert await talk.ask("4", rid="right") == "1abc3abc4"

    played(scene)


def test_nothing_continues_what_is_being_replaced() -> None:
    async def scene(talk: Talk) -> None:
        await talk.ask("0", own_rid="root")
        await talk.ask("1", own_rid="a")
        await talk.ask("2", own_rid="b")
        await talk.ask("9", rid="root", own_rid="elsewhere")
        replacing = await talk.begin("3", rid="a", own_rid="c", replace=True)
        for rid in ("a", "b"):
            assert (await talk.refused("x", rid=rid)).status == 409
        assert (await talk.refused("x", rid="root", replace=True)).status == 409
        elsewhere = await talk.begin("y", rid="elsewhere")
        await replacing.collect()
        await elsewhere.collect()
        assert await talk.ask("4", rid="c") == "0abc1abc3abc4"

    played(scene)


# ---- bounds ---------------------------------------------------------------------------------------------------------


def test_opening_and_closing() -> None:
    async def scene(talk: Talk) -> None:
        store = talk.store
        name = store.open()
        assert len(name) >= 16
        assert name != store.open("")
        with pytest.raises(InvalidRequest) as caught:
            store.open("s")
        assert (caught.value.status, caught.value.param) == (409, "session_id")
        store.close("s")
        for attempt in (lambda: store.close("s"), lambda: store.close("")):
            with pytest.raises(InvalidRequest) as caught:
                attempt()
            assert (caught.value.status, caught.value.param) == (404, "session_id")
        error = await talk.refused("x")
        assert (error.status, error.param, error.code) == (404, "session_params.id", "session_not_found")
        store.open("s")
        assert await talk.ask("1") == "1"

    played(scene)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"session_id": "x" * 257}, "session_id"),
        ({"capacity": -1}, "capacity_of_str_len"),
        ({"timeout": 0.0}, "timeout"),
        ({"timeout": -1.0}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
    ],
)
def test_bad_limits_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        InMemorySessions(SessionStoreOptions(), SessionStoreContext()).open(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_their_number_is_bounded() -> None:
    store = InMemorySessions(SessionStoreOptions(max_sessions=2), SessionStoreContext())
    store.open("a")
    store.open("b")
    with pytest.raises(InvalidRequest) as caught:
        store.open("c")
    assert caught.value.status == 429
    store.close("a")
    store.open("c")


def test_the_key_that_has_most_gives_way() -> None:
    """It may have all, and loses what was idle for longest to keys that have fewer, until they have as many."""
    clock = Clock()
    store = InMemorySessions(SessionStoreOptions(max_sessions=5), SessionStoreContext(clock))

    def refused(principal: str) -> bool:
        with pytest.raises(InvalidRequest) as caught:
            store.open("x", principal=principal)
        return caught.value.code == "too_many_sessions"

    for name in "abcde":
        clock.now += 1.0
        store.open(name, principal="alice")
    assert refused("alice")
    store.open("1", principal="bob")
    store.open("2", principal="bob")
    assert refused("bob"), "keys would take turns in taking it from each other"
    assert refused("alice")
    store.open("!", principal="carol")
    assert refused("carol")
    for name in "de12!":
        store.close(name)
    assert store.stats()["open"] == 0


def test_a_session_at_work_does_not_give_way() -> None:
    async def scene(talk: Talk) -> None:
        running = await talk.begin("a")
        talk.clock.now += 1.0
        talk.store.open("idle")
        talk.store.open("b", principal="bob")
        talk.store.close("b")
        assert talk.store.stats()["open"] == 1
        await running.collect()
        assert await talk.ask("b") == "aabcb"

    played(scene, max_sessions=2)


def test_their_tokens_are_bounded() -> None:
    async def scene(talk: Talk) -> None:
        await talk.ask("12345", own_rid="a")
        assert (await talk.refused("1234")).code == "session_full"
        assert await talk.ask("123") == "12345abc123"
        error = await talk.refused("1")
        assert (error.status, error.code, error.param) == (400, "session_full", "session_params.id")
        assert (await talk.refused("1", rid="a")).code == "session_full", "branches count together"
        assert await talk.ask("123", rid="a", replace=True) == "12345abc123"
        assert (await talk.refused("x" * 12, replace=True)).code == "session_full"
        assert await talk.ask("x" * 11, replace=True) == "x" * 11

    played(scene, max_session_tokens=11)


def test_a_session_may_ask_for_less() -> None:
    async def scene(talk: Talk) -> None:
        talk.store.close("s")
        talk.store.open("s", capacity=5)
        assert (await talk.refused("123456")).code == "session_full"
        talk.store.close("s")
        talk.store.open("s", capacity=50)
        assert (await talk.refused("x" * 12)).code == "session_full", "not more than the server allows"

    played(scene, max_session_tokens=11)


def test_the_number_of_turns_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pegboard.plugins.sessions_in_memory.store.MAX_TURNS", 2)

    async def scene(talk: Talk) -> None:
        await talk.ask("1", own_rid="a")
        running = await talk.begin("2", rid="a")
        assert (await talk.refused("3", rid="a")).code == "session_full", "running ones count"
        await running.aclose()
        await talk.ask("2")
        assert (await talk.refused("3")).code == "session_full"
        assert await talk.ask("3", rid="a", replace=True) == "1abc3"

    played(scene)


def test_idle_sessions_are_closed() -> None:
    async def scene(talk: Talk) -> None:
        talk.store.open("brief", timeout=5.0)
        talk.store.open("greedy", timeout=500.0)
        talk.clock.now = 6.0
        assert talk.store.stats()["open"] == 2
        await talk.ask("1")
        talk.clock.now = 101.0
        assert await talk.ask("2") == "1abc2", "not idle for 100 seconds"
        with pytest.raises(InvalidRequest):
            talk.store.close("greedy")
        talk.clock.now = 202.0
        assert (await talk.refused("3")).code == "session_not_found"

    played(scene, idle_timeout=100.0)


def test_a_session_with_a_running_turn_is_not_idle() -> None:
    async def scene(talk: Talk) -> None:
        running = await talk.begin("1")
        talk.clock.now = 1000.0
        assert talk.store.stats() == {"open": 1, "busy": 1, "tokens": 0}
        await running.collect()
        talk.clock.now = 1050.0
        assert await talk.ask("2") == "1abc2"

    played(scene, idle_timeout=100.0)


def test_closing_does_not_disturb_a_running_turn() -> None:
    async def scene(talk: Talk) -> None:
        running = await talk.begin("1")
        talk.store.close("s")
        talk.store.open("s")
        [answer] = await running.collect()
        assert answer.text == "abc"
        assert await talk.ask("2") == "2"

    played(scene)


# ---- requests without one -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [None, SessionParams(), SessionParams(id="")])
@pytest.mark.parametrize("store", [InMemorySessions(SessionStoreOptions(), SessionStoreContext()), NoSessions()])
def test_requests_without_a_session_pass_as_they_are(
    store: InMemorySessions | NoSessions, params: SessionParams | None
) -> None:
    async def scene() -> None:
        client = FakeEngineClient()
        requests = [GenerateRequest(prompt="a"), GenerateRequest(prompt=[1])]
        streams = await store.submit(client, params, requests)
        assert len(streams) == 2
        assert client.requests == requests

    asyncio.run(scene())


def test_several_requests_are_no_turn() -> None:
    async def scene(talk: Talk) -> None:
        with pytest.raises(InvalidRequest) as caught:
            await talk.store.submit(talk.client, SessionParams(id="s"), [GenerateRequest(prompt="a")] * 2)
        assert (caught.value.status, caught.value.param) == (400, "session_params")

    played(scene)


def test_a_turn_needs_a_session() -> None:
    async def scene(talk: Talk) -> None:
        with pytest.raises(InvalidRequest) as caught:
            await talk.store.submit(talk.client, SessionParams(rid="a"), [GenerateRequest(prompt="a")])
        assert caught.value.param == "session_params.id"

    played(scene)


def test_a_server_without_sessions_says_so() -> None:
    store = NoSessions()
    with pytest.raises(InvalidRequest, match="keeps no sessions"):
        store.open()
    with pytest.raises(InvalidRequest, match="keeps no sessions"):
        store.close("s")
    with pytest.raises(InvalidRequest, match="keeps no sessions"):
        asyncio.run(_submit(store))


async def _submit(store: NoSessions) -> None:
    await store.submit(FakeEngineClient(), SessionParams(id="s"), [GenerateRequest(prompt="a")])


# ---- against a plain model ------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_sequence_of_turns_equals_whole_copies(data: st.DataObject) -> None:
    """The store keeps what each turn added; here every turn keeps its whole history."""

    async def scene() -> None:
        talk = Talk()
        kept: dict[str, tuple[str, int, str | None]] = {}
        last: str | None = None
        for number in range(data.draw(st.integers(1, 12))):
            rid = data.draw(st.sampled_from(["", *kept]))
            replace, drop = data.draw(st.booleans()), data.draw(st.booleans())
            well = data.draw(st.booleans())
            parent = rid or (None if replace else last)
            history, output, _ = kept[parent] if parent else ("", 0, None)
            if drop and parent:
                history = history[: len(history) - output]
            offset = data.draw(st.integers(-len(history), len(history)))
            cut = history[:offset] if offset else history
            new = "x" * data.draw(st.integers(1, 3))
            answers = await talk.begin(
                new, own_rid=f"t{number}", rid=rid, replace=replace, drop_previous_output=drop, offset=offset
            )
            assert talk.seen == cut + new
            if not well:
                await answers.aclose()
                continue
            await answers.collect()
            if replace:
                gone = {parent}
                for name, (_, _, above) in list(kept.items()):
                    if above in gone:
                        gone.add(name)
                        del kept[name]
            last = f"t{number}"
            kept[last] = (cut + new + "abc", 3, parent)

    asyncio.run(scene())
