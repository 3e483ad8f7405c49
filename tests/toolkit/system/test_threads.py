"""How compute threads wait is settled before torch is loaded, and the environment has the last word."""

from __future__ import annotations

import pytest

from pegboard.toolkit.system.threads import YIELDING, yield_when_waiting


def test_sets_both_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in YIELDING:
        monkeypatch.delenv(name, raising=False)
    env: dict[str, str] = {}
    monkeypatch.setattr("pegboard.toolkit.system.threads.os.environ", env)
    yield_when_waiting()
    assert env == YIELDING


@pytest.mark.parametrize("name", YIELDING)
def test_respects_the_operator(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    env = {name: "ACTIVE"}
    monkeypatch.setattr("pegboard.toolkit.system.threads.os.environ", env)
    yield_when_waiting()
    assert env == {name: "ACTIVE"}
