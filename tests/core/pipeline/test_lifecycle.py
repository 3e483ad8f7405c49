"""How requests end before their time."""

from __future__ import annotations

import pytest

from pegboard.core.interfaces.messages import AbortRequest
from pegboard.core.interfaces.req import NO_ROW, Req
from pegboard.core.interfaces.status import ReqStatus
from tests.core.pipeline.harness import Harness, oracle


def status_of(harness: Harness, rid: str) -> ReqStatus:
    return harness.scheduler.requests.alive[rid].status


@pytest.mark.parametrize("when", ["waiting", "chunked", "running", "retracted"])
def test_abort_frees_everything_within_one_step(when: str) -> None:
    harness = Harness(chunk=16, page_size=4, tokens=256)
    harness.submit("other", [1, 2, 3], 30, sampling={"ignore_eos": True})
    harness.step()
    harness.submit("victim", list(range(100)), 30)
    for _ in range({"waiting": 0, "chunked": 3, "running": 14, "retracted": 14}[when]):
        harness.step()
    req = harness.scheduler.requests.alive["victim"]
    if when == "retracted":
        harness.scheduler.planner.retract(req)
    assert {"waiting": req.status is ReqStatus.WAITING, "chunked": harness.scheduler.planner.chunked is req}.get(
        when, req.status.value == when
    )
    harness.scheduler.receive([AbortRequest(rid="victim")])
    assert req.kv.row == NO_ROW
    assert req.kv.handle is None
    harness.step()
    assert harness.finish("victim")["type"] == "abort"
    harness.run()
    assert harness.tokens("other") == oracle([1, 2, 3], 30, ignore_eos=True)


@pytest.mark.parametrize("n", [1, 3])
def test_what_ends_with_its_prompt_is_shared_once(n: int) -> None:
    """When it is released. What goes on is shared before that, too."""
    harness = Harness()
    shared: list[str] = []
    share = harness.memory.cache_unfinished

    def noted(req: Req) -> None:
        shared.append(req.rid)
        share(req)

    vars(harness.memory)["cache_unfinished"] = noted
    harness.submit("a", [1, 2, 3, 4], n, sampling={"ignore_eos": True})
    harness.run()
    assert shared == ([] if n == 1 else ["a"])
    assert harness.memory.cache.cached_tokens >= 4


def test_abort_all_and_unknown() -> None:
    harness = Harness()
    for i in range(5):
        harness.submit(f"r{i}", [i], 50)
    harness.step()
    harness.scheduler.receive([AbortRequest(rid="nobody"), AbortRequest(all_requests=True)])
    harness.run()
    assert all(harness.finish(f"r{i}")["type"] == "abort" for i in range(5))
