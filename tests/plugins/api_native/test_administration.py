"""What operators may ask for: what reaches the engine, and what this process does itself."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.plugins.api_native.asking import CheckedClient, Server, asked, played


class Obedient(CheckedClient):
    """Does whatever it is told."""

    async def control(self, action: str, args: dict[str, Any] | None = None) -> dict[str, Any]:
        self.control_answers.setdefault(action, {})
        return await super().control(action, args)


def controlled(path: str, body: Any = None) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
    controls: list[tuple[str, dict[str, Any]]] = []
    answer: dict[str, Any] = {}

    async def scene(server: Server) -> None:
        client = Obedient()
        answer.update(await Server.of(client).told(path, body))
        controls.extend(client.controls)

    played(scene)
    return answer, controls


@pytest.fixture
def root_level() -> Iterator[None]:
    root = logging.getLogger()
    before = root.level
    yield
    root.setLevel(before)


@pytest.mark.parametrize("path", ["/flush_cache", "/reset_prefix_cache"])
def test_flush_cache(path: str) -> None:
    async def scene(server: Server) -> None:
        assert (await server.told(path))["success"] is True
        assert server.client.flushes == 1
        server.client.busy = True
        assert await server.refused(path) == (400, None)

    played(scene)


def test_abort_request() -> None:
    assert asked("/abort_request", {"rid": "x"})[1].abort_calls == [("x", False)]
    assert asked("/abort_request", {"abort_all": True})[1].abort_calls == [("", True)]
    assert asked("/abort_request", {"rid": "", "abort_all": False})[1].abort_calls == []


@pytest.mark.parametrize(
    ("body", "mode"),
    [
        (None, "abort"),
        ({}, "abort"),
        ({"mode": None}, "abort"),
        ({"mode": "retract"}, "retract"),
        ({"mode": "in_place"}, "in_place"),
    ],
)
def test_pause(body: Any, mode: str) -> None:
    answer, controls = controlled("/pause_generation", body)
    assert answer["success"] is True
    assert controls == [("pause_generation", {"mode": mode})]


def test_continue() -> None:
    answer, controls = controlled("/continue_generation")
    assert answer["success"] is True
    assert controls == [("continue_generation", {})]


@pytest.mark.usefixtures("root_level")
def test_logging_changes_in_both_processes() -> None:
    answer, controls = controlled("/configure_logging", {"log_level": "error", "log_requests": False})
    assert answer["success"] is True
    assert controls == [("configure_logging", {"log_level": "error", "log_requests": False})]
    assert logging.getLogger().level == logging.ERROR
    _, controls = controlled("/configure_logging", {"log_requests": True, "log_requests_level": None})
    assert controls == [("configure_logging", {"log_requests": True})]
    assert logging.getLogger().level == logging.ERROR


@pytest.mark.usefixtures("root_level")
def test_a_refusal_changes_nothing_here() -> None:
    before = logging.getLogger().level
    done, _ = asked("/configure_logging", {"log_level": "error"})
    assert (done.status, done.json()["error"]["code"]) == (404, "unknown_action")
    assert logging.getLogger().level == before
    gc.unfreeze()
    assert asked("/freeze_gc")[0].status == 404
    assert gc.get_freeze_count() == 0


def test_freeze_gc() -> None:
    try:
        gc.unfreeze()
        answer, controls = controlled("/freeze_gc")
        assert answer["success"] is True
        assert controls == [("freeze_gc", {})]
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()
