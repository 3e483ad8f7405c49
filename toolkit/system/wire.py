"""The wire between the API process and the scheduler process: msgspec structs as MessagePack over one ZeroMQ pair.

The socket lives in a directory of its own that only this user may enter, and goes with it. Whatever is ready at one
time travels as one ZeroMQ message: its number, then a frame per struct. ZeroMQ silently drops a frame that is too
large, so senders never make one, and receivers check the numbers: a gap is an error. Nothing is ever unpickled.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from pegboard.core.interfaces.errors import PegboardError
from pegboard.core.interfaces.messages import FromScheduler, TokenOutput, TokenOutputs, ToScheduler

MAX_FRAME_BYTES = 256 * 2**20
"""No sender makes a larger frame; ZeroMQ drops those of twice this size."""
PIECE_BYTES = 2**18
"""Outputs of one step are split into frames of about this size, so that a reader can turn to other work in between."""
PIECE_MESSAGES = 64
"""Messages that a reader takes in between two such turns."""
TOO_LARGE = "output_too_large"
_MAX_PATH = 100
"""Unix domain sockets have short paths: 108 bytes on Linux, with the closing zero."""

_PREFIX = "pegboard-"
_SOCKET = "/wire"

_encoder = msgspec.msgpack.Encoder()
_to_scheduler: msgspec.msgpack.Decoder[ToScheduler] = msgspec.msgpack.Decoder(ToScheduler)
_from_scheduler: msgspec.msgpack.Decoder[FromScheduler] = msgspec.msgpack.Decoder(FromScheduler)


def encode(message: ToScheduler | FromScheduler) -> bytes:
    """Return one message as MessagePack."""
    return _encoder.encode(message)


def decode_to_scheduler(data: bytes) -> ToScheduler:
    """Decode a message to the scheduler. Raises msgspec.ValidationError or msgspec.DecodeError for anything else."""
    return _to_scheduler.decode(data)


def decode_from_scheduler(data: bytes) -> FromScheduler:
    """Decode a message of the scheduler. Raises msgspec.ValidationError or msgspec.DecodeError for anything else."""
    return _from_scheduler.decode(data)


class FrameTooLarge(ValueError):
    """One message takes more bytes than a frame may have. Nothing was sent."""


class WireError(PegboardError):
    """Messages are missing: what is under way can no longer be trusted."""


def _checked(message: ToScheduler | FromScheduler, most: int) -> bytes:
    frame = encode(message)
    if len(frame) > most:
        raise FrameTooLarge(f"a {type(message).__name__} of {len(frame)} bytes exceeds the {most} of a frame")
    return frame


class _Numbers:
    """Numbers the messages of one direction, and finds gaps."""

    def __init__(self) -> None:
        self._next = 0

    def give(self) -> bytes:
        number, self._next = self._next, self._next + 1
        return number.to_bytes(8, "little")

    def check(self, head: bytes) -> None:
        """Raise WireError unless this is the number that follows the last one."""
        number = int.from_bytes(head, "little")
        if number != self._next:
            raise WireError(f"message {self._next} is missing: number {number} came instead")
        self._next += 1


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


def last_words_of(address: str) -> Path:
    """Return the file beside a socket in which the scheduler's process says why it ends itself."""
    return Path(address.removeprefix("ipc://")).with_name("last-words")


def remove_endpoint(address: str) -> None:
    """Remove what `Endpoint.close` removes, for a process that only knows the address. Other addresses are left
    alone.
    """
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
        self._inbox: deque[bytes] = deque()
        self._outbox: deque[list[bytes]] = deque()
        """What was sent before the scheduler was there to take it."""
        self._given, self._seen = _Numbers(), _Numbers()
        self._error: WireError | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._closed = False

    async def receive(self) -> list[FromScheduler]:
        """Return what the scheduler has sent and no call has returned yet, in pieces: where much has come, other tasks
        get a turn between two calls. Wait where nothing has come. Raise WireError where messages are missing, and
        msgspec's errors for what is not a message.
        """
        loop = self._watch()
        if self._inbox:
            await asyncio.sleep(0)
        while not self._inbox:
            if self._error is not None:
                raise self._error
            self._waiting = loop.create_future()
            await self._waiting
        messages: list[FromScheduler] = []
        size = 0
        while self._inbox and size < PIECE_BYTES and len(messages) < PIECE_MESSAGES:
            frame = self._inbox.popleft()
            size += len(frame)
            messages.append(decode_from_scheduler(frame))
        return messages

    def send(self, messages: Iterable[ToScheduler]) -> None:
        """Queue messages; returns at once. What cannot be delivered any more is dropped with the wire. Raises
        FrameTooLarge, and msgspec's errors for what cannot be encoded; nothing has left then.
        """
        frames = [_checked(message, MAX_FRAME_BYTES) for message in messages]
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
        """Send what can be sent, take what has arrived, and wake those who wait for it. The file tells once of each
        change, and every call to the socket may take notice of it, so this goes on until nothing is left to do.
        """
        while not self._closed:
            events = int(self._socket.getsockopt(zmq.EVENTS))
            if self._outbox and events & zmq.POLLOUT:
                self._socket.send_multipart([self._given.give(), *self._outbox.popleft()], zmq.NOBLOCK)
            elif events & zmq.POLLIN:
                head, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                try:
                    self._seen.check(head)
                except WireError as error:
                    self._error = self._error or error
                if self._error is None:
                    self._inbox += frames
            else:
                break
        if (self._inbox or self._error is not None) and self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def close(self) -> None:
        """Drop what was not delivered. No call waits in `receive` afterwards."""
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
        self._given, self._seen = _Numbers(), _Numbers()

    def receive(self, timeout_ms: int | None = 0) -> list[ToScheduler]:
        """Return everything that has arrived. Wait up to `timeout_ms` for the first message, None: for ever. Raise
        WireError where messages are missing.
        """
        messages: list[ToScheduler] = []
        if timeout_ms != 0:
            self._socket.poll(timeout_ms)
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            head, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            self._seen.check(head)
            messages.extend(decode_to_scheduler(frame) for frame in frames)
        return messages

    def send(self, messages: Iterable[FromScheduler]) -> None:
        """Queue messages as one. Raises FrameTooLarge; nothing has left then."""
        self._send([_checked(message, MAX_FRAME_BYTES) for message in messages])

    def send_outputs(self, outputs: list[TokenOutput]) -> list[str]:
        """Queue the outputs of a step, in as many frames as their size asks for. Return the ids of requests whose
        output fits into no frame: the other side is told that they failed, and they must be aborted here.
        """
        frames, refused = output_frames(outputs)
        self._send(frames)
        return refused

    def _send(self, frames: list[bytes]) -> None:
        if frames:
            self._socket.send_multipart([self._given.give(), *frames])

    def close(self) -> None:
        """Wait up to two seconds for what was not delivered yet."""
        self._context.destroy(linger=2000)


def output_frames(
    outputs: Sequence[TokenOutput], piece: int = PIECE_BYTES, most: int = MAX_FRAME_BYTES
) -> tuple[list[bytes], list[str]]:
    """TokenOutputs as frames of at most about `piece` bytes, split between requests and then between the tokens of one;
    and the ids of those that would take more than `most` bytes even so, whose frame says that they have failed.

    Whatever the split, the outputs of one request, merged in order, are what they were.
    """
    frame = encode(TokenOutputs(outputs=list(outputs)))
    if len(frame) <= piece:
        return ([frame] if outputs else []), []
    halves = (outputs[: len(outputs) // 2], outputs[len(outputs) // 2 :]) if len(outputs) > 1 else _halves(outputs[0])
    if halves is not None:
        parts = [output_frames(half, piece, most) for half in halves]
        return [one for frames, _ in parts for one in frames], [rid for _, refused in parts for rid in refused]
    if len(frame) <= most:
        return [frame], []
    message = f"the output of one step takes {len(frame)} bytes; ask for fewer logprobs"
    reason = {"type": "abort", "message": message, "status": 500, "code": TOO_LARGE}
    rid = outputs[0].rid
    return [encode(TokenOutputs(outputs=[TokenOutput(rid=rid, token_ids=[], finish_reason=reason)]))], [rid]


def _halves(output: TokenOutput) -> tuple[list[TokenOutput], list[TokenOutput]] | None:
    """Return an output as two that are the same when merged; None for one of a single token. The end and the counters,
    which are totals, go with the second half, and what stages say of the whole with the first.
    """
    count = len(output.token_ids)
    middle = count // 2
    if not middle:
        return None
    rows = output.rows
    logprobs = output.logprobs
    first = TokenOutput(
        rid=output.rid,
        token_ids=output.token_ids[:middle],
        logprobs=None if logprobs is None else logprobs[:middle],
        features=output.features,
        rows=None if rows is None else {name: some[:middle] for name, some in rows.items()},
    )
    second = msgspec.structs.replace(
        output,
        token_ids=output.token_ids[middle:],
        logprobs=None if logprobs is None else logprobs[middle:],
        features=None,
        rows=None if rows is None else {name: some[middle:] for name, some in rows.items()},
    )
    return [first], [second]


def _configure(socket: zmq.Socket[Any]) -> None:
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_FRAME_BYTES)
