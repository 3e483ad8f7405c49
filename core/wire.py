"""The wire between the API process and the scheduler process: msgspec structs as MessagePack over one ZeroMQ pair.

The socket lives in a directory of its own that only this user may enter, and goes with it. Whatever is ready at one
time travels as one ZeroMQ message with a frame per struct. Nothing is ever unpickled.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from pegboard.core.interfaces.messages import FromScheduler, ToScheduler

MAX_MESSAGE_BYTES = 512 * 2**20
_MAX_PATH = 100
"""Unix domain sockets have short paths: 108 bytes on Linux, with the closing zero."""

_PREFIX = "pegboard-"
_SOCKET = "/wire"

_encoder = msgspec.msgpack.Encoder()
_to_scheduler: msgspec.msgpack.Decoder[ToScheduler] = msgspec.msgpack.Decoder(ToScheduler)
_from_scheduler: msgspec.msgpack.Decoder[FromScheduler] = msgspec.msgpack.Decoder(FromScheduler)


def encode(message: ToScheduler | FromScheduler) -> bytes:
    """One message as MessagePack."""
    return _encoder.encode(message)


def decode_to_scheduler(data: bytes) -> ToScheduler:
    """Raises msgspec.ValidationError or msgspec.DecodeError for anything but a message to the scheduler."""
    return _to_scheduler.decode(data)


def decode_from_scheduler(data: bytes) -> FromScheduler:
    """Raises msgspec.ValidationError or msgspec.DecodeError for anything but a message of the scheduler."""
    return _from_scheduler.decode(data)


class Endpoint:
    """A private directory (mode 0700) with the path of one socket in it; `close` removes it."""

    def __init__(self) -> None:
        directory = tempfile.mkdtemp(prefix=_PREFIX)
        if len(directory) > _MAX_PATH - len(_SOCKET):
            Path(directory).rmdir()
            directory = tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp")
        self.directory = Path(directory)

    @property
    def address(self) -> str:
        return f"ipc://{self.directory}{_SOCKET}"

    def close(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


def remove_endpoint(address: str) -> None:
    """What `Endpoint.close` does, for a process that only knows the address. Other addresses are left alone."""
    directory = Path(address.removeprefix("ipc://").removesuffix(_SOCKET))
    if directory.name.startswith(_PREFIX) and address == f"ipc://{directory}{_SOCKET}":
        shutil.rmtree(directory, ignore_errors=True)


class ApiWire:
    """The API process's end, for asyncio. It binds, so it exists before the scheduler does."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        _configure(self._socket)
        self._socket.bind(endpoint.address)

    async def receive(self) -> list[FromScheduler]:
        """What the scheduler sent next; waits for it."""
        return [decode_from_scheduler(frame) for frame in await self._socket.recv_multipart()]

    def send(self, messages: Iterable[ToScheduler]) -> None:
        """Queue messages; returns at once. What cannot be delivered any more is dropped with the wire."""
        frames = [encode(message) for message in messages]
        if frames:
            # Nobody awaits this: the queue is unbounded, so it is done at once or never (the peer is gone).
            self._socket.send_multipart(frames)

    def close(self) -> None:
        """Drops what was not delivered."""
        self._context.destroy(linger=0)


class SchedulerWire:
    """The scheduler process's end: blocking, for its one loop."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        _configure(self._socket)
        self._socket.connect(address)

    def receive(self, timeout_ms: int | None = 0) -> list[ToScheduler]:
        """Everything that has arrived. Waits up to `timeout_ms` for the first message, None: for ever."""
        messages: list[ToScheduler] = []
        wait = timeout_ms
        while self._socket.poll(-1 if wait is None else wait):
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            messages.extend(decode_to_scheduler(frame) for frame in frames)
            wait = 0
        return messages

    def send(self, messages: Iterable[FromScheduler]) -> None:
        """Queue messages as one."""
        frames = [encode(message) for message in messages]
        if frames:
            self._socket.send_multipart(frames)

    def close(self) -> None:
        """Waits up to two seconds for what was not delivered yet."""
        self._context.destroy(linger=2000)


def _configure(socket: zmq.Socket[Any]) -> None:
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
