"""The wire between the API process and the scheduler process: msgspec structs as MessagePack over one ZeroMQ pair.

The socket lives in a directory of its own that only this user may enter, and goes with it. Whatever is ready at one
time travels as one ZeroMQ message with a frame per struct. Nothing is ever unpickled.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import zmq

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
    """The API process's end, for asyncio. It binds, so it exists before the scheduler does.

    The loop watches the socket's file itself: pyzmq's asyncio sockets cost several times as much per message.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        _configure(self._socket)
        self._socket.bind(endpoint.address)
        self._file = int(self._socket.getsockopt(zmq.FD))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: list[bytes] = []
        self._outbox: list[list[bytes]] = []
        """What was sent before the scheduler was there to take it."""
        self._waiting: asyncio.Future[None] | None = None
        self._closed = False

    async def receive(self) -> list[FromScheduler]:
        """All that the scheduler has sent since the last call; waits where that is nothing."""
        loop = self._watch()
        while not self._inbox:
            self._waiting = loop.create_future()
            await self._waiting
        frames, self._inbox = self._inbox, []
        return [decode_from_scheduler(frame) for frame in frames]

    def send(self, messages: Iterable[ToScheduler]) -> None:
        """Queue messages; returns at once. What cannot be delivered any more is dropped with the wire."""
        frames = [encode(message) for message in messages]
        if frames and not self._closed:
            self._watch()
            self._outbox.append(frames)
            self._look()

    def _watch(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._file, self._look)
            self._look()
        return self._loop

    def _look(self) -> None:
        """Send what can be sent, take what has arrived, and wake whoever waits for it. The file tells once of each
        change, and every call to the socket may take notice of it, so this goes on until nothing is left to do.
        """
        while not self._closed:
            events = int(self._socket.getsockopt(zmq.EVENTS))
            if self._outbox and events & zmq.POLLOUT:
                self._socket.send_multipart(self._outbox.pop(0), zmq.NOBLOCK)
            elif events & zmq.POLLIN:
                self._inbox += self._socket.recv_multipart(zmq.NOBLOCK)
            else:
                break
        if self._inbox and self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def close(self) -> None:
        """Drops what was not delivered. Nobody waits in `receive` afterwards."""
        if self._closed:
            return
        self._closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._file)
        if self._waiting is not None:
            self._waiting.cancel()
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
        if timeout_ms != 0:
            self._socket.poll(timeout_ms)
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            messages.extend(decode_to_scheduler(frame) for frame in self._socket.recv_multipart(zmq.NOBLOCK))
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
