"""A connection's life without its socket: bytes and time go in, bytes and events come out."""

from __future__ import annotations

from dataclasses import dataclass

from pegboard.plugins.disagg.frames import FrameReader, FrameTooLong, framed
from pegboard.plugins.disagg.handshake import Answering, Connecting, Peer, Refused
from pegboard.plugins.disagg.messages import (
    MAX_FRAME,
    MAX_OPENING,
    AboutRooms,
    Drop,
    Fail,
    Gone,
    Kept,
    Message,
    NotAMessage,
    Ping,
    Pong,
    Ready,
    Taken,
    Want,
    decode,
    encode,
)

SAID_BY = {"decode": (Want, Taken, Drop), "prefill": (Ready, Kept, Gone, Fail)}


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Seconds: for the handshake, between pings, and pings without an answer after which the peer is lost. Bytes that
    wait to be sent at most.
    """

    opening: float = 5.0
    ping: float = 2.0
    misses: int = 3
    unsent: int = 32 * 2**20


class Link:
    """One connection. `receive` and `tick` return messages about rooms; `output` is what is to be sent.

    It is `over` after anything that is not the protocol: `reason` says what. Then what `output` still has goes out, and
    the socket is closed.
    """

    def __init__(self, hand: Connecting | Answering, now: float, limits: LinkLimits | None = None) -> None:
        self._hand = hand
        self._limits = limits or LinkLimits()
        self._frames = FrameReader(MAX_OPENING)
        self.began = now
        self._pinged = now
        self._heard = now
        self._number = 0
        self._unsent = bytearray()
        self.peer: Peer | None = None
        """The other side, once the handshake is through."""
        self.over = False
        self.refused = False
        """Whether it is over because the two do not go together, so that another try changes nothing."""
        self.silent = False
        """Whether it is over because nothing was heard for too long."""
        self.reason = ""
        first = hand.begin()
        if first is not None:
            self._put(first)

    def output(self) -> bytes:
        """Return what is to be sent, once."""
        data = bytes(self._unsent)
        self._unsent.clear()
        return data

    def send(self, message: AboutRooms) -> None:
        """Have a message sent."""
        if not self.over and self.peer is not None:
            self._put(message)

    def waiting(self, unsent: int) -> None:
        """Learn how many bytes of what was given out have not left: a peer that takes nothing is lost."""
        if unsent > self._limits.unsent:
            self.end(f"it takes nothing: {unsent} bytes wait to be sent")

    def receive(self, data: bytes, now: float) -> list[AboutRooms]:
        """Take bytes, return what they say about rooms."""
        said: list[AboutRooms] = []
        self._frames.feed(data)
        try:
            while not self.over and (body := self._frames.next()) is not None:
                self._heard = now
                self._take(decode(body), said)
        except (FrameTooLong, NotAMessage) as error:
            self.end(str(error)[:500])
        except Refused as error:
            self.refused = True
            if error.answer is not None:
                self._put(error.answer)
            self.end(str(error))
        return said

    def tick(self, now: float) -> None:
        """Learn what time it is: pings go out, and what was silent for too long ends."""
        if self.over:
            return
        if self.peer is None:
            if now - self.began >= self._limits.opening:
                self.end(f"no handshake within {self._limits.opening:g} s")
            return
        if now - self._heard >= self._limits.ping * self._limits.misses:
            self.silent = True
            self.end(f"nothing heard for {now - self._heard:.1f} s")
        elif now - self._pinged >= self._limits.ping:
            self._pinged = now
            self._number += 1
            self._put(Ping(self._number))

    def end(self, reason: str) -> None:
        """End it; the first reason counts."""
        if not self.over:
            self.over, self.reason = True, reason

    def _take(self, message: Message, said: list[AboutRooms]) -> None:
        if self.peer is None:
            answer, self.peer = self._hand.take(message)
            if self._hand.trusted:
                self._frames.limit = MAX_FRAME
            if answer is not None:
                self._put(answer)
        elif isinstance(message, Ping):
            self._put(Pong(message.number))
        elif isinstance(message, SAID_BY[self.peer.role]):
            said.append(message)
        elif not isinstance(message, Pong):
            self.end(f"a {type(message).__name__} from a {self.peer.role} server")

    def _put(self, message: Message) -> None:
        self._unsent += framed(encode(message))
