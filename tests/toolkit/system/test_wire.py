"""The wire: plain structs, a private path, nothing unpickled."""

from __future__ import annotations

import asyncio
import pickle
import stat
import tempfile
import time
from pathlib import Path

import msgspec
import pytest

from pegboard.core.interfaces.messages import (
    AbortRequest,
    Accepted,
    ControlReply,
    ControlRequest,
    FromScheduler,
    Ready,
    Rejected,
    Shutdown,
    StartFailed,
    TokenizedBatch,
    TokenizedRequest,
    TokenOutput,
    TokenOutputs,
    ToScheduler,
)
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.toolkit.system.wire import (
    ApiWire,
    Endpoint,
    SchedulerWire,
    decode_from_scheduler,
    decode_to_scheduler,
    encode,
    remove_endpoint,
)

REQUEST = TokenizedRequest(
    rid="r", prompt=b"\1\0\0\0", sampling=SamplingParams(stop=("x",), logit_bias={3: -1.5}, extra={"p": {"q": [1]}})
)
TO: list[ToScheduler] = [
    REQUEST,
    TokenizedBatch(requests=[REQUEST]),
    AbortRequest(rid="r"),
    ControlRequest(call_id=1, action="info"),
    Shutdown(),
]
FROM: list[FromScheduler] = [
    Accepted(rid="r"),
    Rejected(rid="r", status=503, code="queue_full", message="later"),
    TokenOutputs(outputs=[TokenOutput(rid="r", token_ids=[1], logprobs=[(-0.5, 1, [(-0.5, 1), (float("-inf"), 2)])])]),
    ControlReply(call_id=1, ok=True, payload={"n": 1}),
    Ready(info={"a": 1}, directory="/x"),
    StartFailed(message="no"),
]


@pytest.mark.parametrize("message", TO, ids=lambda one: type(one).__name__)
def test_to_the_scheduler_and_back(message: ToScheduler) -> None:
    assert decode_to_scheduler(encode(message)) == message


@pytest.mark.parametrize("message", FROM, ids=lambda one: type(one).__name__)
def test_from_the_scheduler_and_back(message: FromScheduler) -> None:
    assert decode_from_scheduler(encode(message)) == message


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", pickle.dumps({"a": 1}), msgspec.msgpack.encode({"type": "os.system"}), encode(Accepted(rid="r"))],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_to_scheduler(data)


def test_endpoint_is_private_and_goes() -> None:
    endpoint = Endpoint()
    directory = endpoint.directory
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    endpoint.close()
    assert not directory.exists()
    endpoint.close()


def test_an_endpoint_is_removed_by_its_address(tmp_path: Path) -> None:
    endpoint = Endpoint()
    remove_endpoint(endpoint.address)
    assert not endpoint.directory.exists()
    other = tmp_path / "precious"
    other.mkdir()
    for address in (f"ipc://{other}/wire", f"ipc://{tmp_path}/precious", f"ipc://{other}/pegboard-x", "tcp://x:1"):
        remove_endpoint(address)
    assert other.is_dir()


def test_endpoint_path_is_short_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    endpoint = Endpoint()
    assert len(endpoint.address) < 108
    endpoint.close()


def test_both_ends() -> None:
    async def scene() -> None:
        endpoint = Endpoint()
        api = ApiWire(endpoint)
        scheduler = SchedulerWire(endpoint.address)
        try:
            assert scheduler.receive(0) == []
            api.send(TO[:2])
            api.send(TO[2:])
            got: list[ToScheduler] = []
            while len(got) < len(TO):
                got += await asyncio.to_thread(scheduler.receive, None)
            assert got == TO
            scheduler.send(FROM)
            assert await asyncio.wait_for(api.receive(), 10) == FROM
        finally:
            scheduler.close()
            api.close()
            endpoint.close()

    asyncio.run(scene())


def test_nothing_is_lost_between_the_two_directions() -> None:
    """A socket tells once of what has arrived, and whoever sends may be the one that hears of it."""

    async def scene() -> None:
        endpoint = Endpoint()
        api = ApiWire(endpoint)
        scheduler = SchedulerWire(endpoint.address)
        try:
            for round_ in range(30):
                impatient = asyncio.ensure_future(api.receive())
                await asyncio.sleep(0)
                impatient.cancel()
                scheduler.send([Accepted(rid=f"{round_}")])
                if round_ % 3:
                    time.sleep(0.003)  # it arrives while the loop does not look
                api.send([AbortRequest(rid=f"{round_}")])
                assert await asyncio.wait_for(api.receive(), 10) == [Accepted(rid=f"{round_}")]
                assert await asyncio.to_thread(scheduler.receive, 10_000) == [AbortRequest(rid=f"{round_}")]
            waiting = asyncio.ensure_future(api.receive())
            await asyncio.sleep(0)
        finally:
            scheduler.close()
            api.close()
            api.close()
            endpoint.close()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(waiting, 10)
        api.send([Shutdown()])

    asyncio.run(scene())


def test_sending_without_a_reader_does_not_block() -> None:
    async def scene() -> None:
        endpoint = Endpoint()
        api = ApiWire(endpoint)
        for _ in range(100):
            api.send([REQUEST])
        api.close()
        endpoint.close()

    asyncio.run(scene())
