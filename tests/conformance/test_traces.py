"""Traces of requests that are gone."""

from __future__ import annotations

import pytest

from pegboard.conformance.fakes import make_req
from pegboard.conformance.rig import traces as module
from pegboard.conformance.rig.traces import traces


class Keeper:
    def __init__(self, kept: object) -> None:
        self.kept = kept


def test_what_is_kept_is_found_behind_much_else() -> None:
    req = make_req("request-of-a-test")
    assert traces(Keeper([req, *range(5000)]), req) == ["self.kept"]
    assert traces(Keeper([*range(5000)]), req) == []


def test_more_than_can_be_looked_through_is_no_all_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_MOST", 1000)
    req = make_req("request-of-a-test")
    with pytest.raises(AssertionError, match=r"self\.kept leads to more than 1000 objects, so it cannot be told"):
        traces(Keeper([*map(float, range(5000)), req]), req)
