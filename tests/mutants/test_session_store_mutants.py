"""Broken session stores, and the tests of the suite that notice."""

from __future__ import annotations

import msgspec
import pytest

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.plugins.sessions_in_memory.api import SessionParams
from pegboard.plugins.sessions_in_memory.store import InMemorySessions
from pegboard.plugins.sessions_in_memory.suite import SessionStoreContract


class Changed(InMemorySessions):
    """Reads `session_params` wrongly; subclasses say how."""

    def change(self, params: SessionParams) -> SessionParams:
        return params

    async def submit(self, client, params, requests):
        return await super().submit(client, params and self.change(params), requests)


class ForgetsEverything(Changed):
    def change(self, params):
        return params.model_copy(update={"replace": True})


class MixesSessions(Changed):
    def change(self, params):
        return params.model_copy(update={"id": "s"}) if params.id in self._sessions else params


class AlwaysContinuesTheLast(Changed):
    def change(self, params):
        return params.model_copy(update={"rid": None})


class IgnoresOffsets(Changed):
    def change(self, params):
        return params.model_copy(update={"offset": None})


class KeepsAnswers(Changed):
    def change(self, params):
        return params.model_copy(update={"drop_previous_output": None})


class NeverReplaces(Changed):
    def change(self, params):
        return params.model_copy(update={"replace": None})


class RemembersUnreadAnswers(InMemorySessions):
    async def submit(self, client, params, requests):
        streams = await super().submit(client, params, requests)
        for stream in streams:
            if hasattr(stream, "_end"):
                stream._end(well=True)
        return streams


class KeepsRefusedTurnsRunning(InMemorySessions):
    async def submit(self, client, params, requests):
        try:
            return await super().submit(client, params, requests)
        except Exception:
            if params and params.id in self._sessions and len(requests) == 1:
                session = self._sessions[params.id]
                turn = session.begin(SessionParams(id=params.id), requests[0].rid or "stuck")
                assert turn  # type: ignore[truthy-bool]
            raise


class LosesPictures(InMemorySessions):
    async def submit(self, client, params, requests):
        bare = [msgspec.structs.replace(one, prompt=getattr(one.prompt, "base", one.prompt)) for one in requests]
        return await super().submit(client, params, bare)


class TakesSeveral(InMemorySessions):
    async def submit(self, client, params, requests):
        return await super().submit(client, params if len(requests) == 1 else None, requests)


class OpensTwice(InMemorySessions):
    def open(self, session_id="", **limits):
        self._sessions.pop(session_id, None)
        return super().open(session_id, **limits)


class ClosesNothing(InMemorySessions):
    def close(self, session_id):
        self._find(session_id, "session_id")


class HasNoEnd(InMemorySessions):
    def open(self, session_id="", **limits):
        return super().open(session_id)


class PutsHistoryBehind(InMemorySessions):
    async def submit(self, client, params, requests):
        submit_all = client.submit_all

        async def turned(whole):
            done = []
            for one in whole:
                prompt = list(one.prompt) if not isinstance(one.prompt, str) else list(map(ord, one.prompt))
                own = len(requests[0].prompt)
                done.append(msgspec.structs.replace(one, prompt=prompt[-own:] + prompt[:-own]))
            return await submit_all(done)

        client.submit_all = turned
        try:
            return await super().submit(client, params, requests)
        finally:
            client.submit_all = submit_all


CAUGHT = {
    ForgetsEverything: "test_a_turn_continues_the_one_before",
    PutsHistoryBehind: "test_a_turn_continues_the_one_before",
    MixesSessions: "test_sessions_are_apart",
    AlwaysContinuesTheLast: "test_a_named_turn_is_continued_as_a_branch",
    IgnoresOffsets: "test_history_can_be_cut",
    KeepsAnswers: "test_history_can_be_cut",
    NeverReplaces: "test_what_was_replaced_is_gone",
    RemembersUnreadAnswers: "test_an_answer_that_is_not_read_is_no_history",
    KeepsRefusedTurnsRunning: "test_a_refusal_of_the_engine_leaves_the_session_as_it_was",
    LosesPictures: "test_pictures_are_refused",
    TakesSeveral: "test_a_turn_is_one_request",
    OpensTwice: "test_a_session_is_opened_once_and_closed_once",
    ClosesNothing: "test_a_session_is_opened_once_and_closed_once",
    HasNoEnd: "test_a_full_session_says_so",
}
MUTANTS = [Mutant(cls, suite=SessionStoreContract, caught_by=test) for cls, test in CAUGHT.items()]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
