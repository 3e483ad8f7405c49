"""Text to tokens beside an event loop. The tokenizer works without the interpreter's lock, so one thread per lane is
enough: long texts go one at a time and do not keep shorter ones waiting (`LongLane`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from pegboard.core.interfaces.errors import InvalidRequest

if TYPE_CHECKING:
    from pegboard.core.interfaces.tokenizer import Tokenizer

INLINE_CHARS = 2048
"""Up to so many characters take about a millisecond; a thread would take as long to wake up."""
LONG_CHARS = 64 * 1024
CHARS_PER_TOKEN = 32
"""Text longer than this times the context is refused before it is tokenised. Prose has 3 to 6 characters per token, and
code with long runs of spaces under 20."""

MOST_WAITING = 16 * 2**20
"""Most characters of long texts that wait for the thread, of a size or shorter: 10 to 20 seconds of work. There are
hardly ever more tokens in them than the scheduler's queue takes."""
OLDEST_EVERY = 4
"""One long text in so many is the one that has waited longest, whatever its size, so that each has its turn."""

Ranges = tuple[tuple[int, int], ...]
"""[start, stop) of characters of a text, in their order."""


class Text(NamedTuple):
    """A text, whether the model's own special tokens are added around it, and what in it means itself: see
    `encode_now`.
    """

    text: str
    special: bool
    literals: Ranges = ()


@dataclass(eq=False, slots=True)
class _Job:
    length: int
    work: Callable[[], list[int]]
    future: Future[list[int]]

    @property
    def size(self) -> int:
        """Lengths up to twice as long are of one size."""
        return self.length.bit_length()


class LongLane:
    """One thread for long texts. Shorter ones go first, those of one size in the order in which they came: many very
    long texts do not keep a text of some pages waiting. Thread-safe.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "tokenise-long")
        self._lock = Lock()
        self._waiting: list[_Job] = []
        """In the order in which they came."""
        self._turns = 0

    def submit(self, length: int, work: Callable[[], list[int]]) -> Future[list[int]]:
        """Do the work of a text of this length when its turn comes; cancel the future to give that up. Raises
        InvalidRequest (503) where more characters wait of texts that go before it, or beside it, than `MOST_WAITING`.
        """
        job = _Job(length, work, Future())
        with self._lock:
            before = sum(one.length for one in self._waiting if one.size <= job.size)
            if before and before + length > MOST_WAITING:
                raise InvalidRequest(
                    f"{before:,} characters of texts like this one, which has {length:,}, wait to become tokens, which "
                    f"happens to one of them at a time: try again later",
                    code="tokenizer_busy",
                    status=503,
                )
            self._waiting.append(job)
        job.future.add_done_callback(lambda future: self._give_up(job) if future.cancelled() else None)
        self._thread.submit(self._next)
        return job.future

    def _give_up(self, job: _Job) -> None:
        with self._lock:
            if job in self._waiting:
                self._waiting.remove(job)

    def _next(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            self._turns += 1
            first = (
                self._waiting[0] if self._turns % OLDEST_EVERY == 0 else min(self._waiting, key=lambda one: one.size)
            )
            self._waiting.remove(first)
        if not first.future.set_running_or_notify_cancel():
            return
        try:
            first.future.set_result(first.work())
        except BaseException as error:
            first.future.set_exception(error)


_medium = ThreadPoolExecutor(1, "tokenise")
_long = LongLane()


def overflow(tokens: str | int, most: int, context: int) -> str:
    """Return what is said of a prompt that does not fit, with code `context_length_exceeded`: in the words by which
    clients (litellm, LangChain, coding agents) tell that they have to shorten a conversation. `most` tokens would have
    fitted.
    """
    return (
        f"prompt is too long: {tokens} tokens > {most} maximum; this model's maximum context length is {context} tokens"
    )


def check_length(text: str, context: int, param: str = "prompt") -> None:
    """Raise InvalidRequest for a text that cannot fit into a context of so many tokens."""
    if len(text) > context * CHARS_PER_TOKEN:
        raise InvalidRequest(
            f"{overflow(f'over {context}', context - 1, context)}; the text has {len(text)} characters",
            param=param,
            code="context_length_exceeded",
        )


def encode_now(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True, literals: Ranges = ()) -> list[int]:
    """Return the tokens of a text, whose `literals` mean themselves and spell no token. Raises ValueError for literals
    that are no ranges of it.
    """
    if not literals:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    before, after = _around(tokenizer) if add_special_tokens else ([], [])
    ids, at = list(before), 0
    for start, stop in literals:
        if not at <= start < stop <= len(text):
            raise ValueError(f"[{start}, {stop}) is not a range behind {at} of a text of {len(text)} characters")
        if at < start:
            ids += tokenizer.encode(text[at:start], add_special_tokens=False)
        ids += tokenizer.encode_literal(text[start:stop])
        at = stop
    if at < len(text):
        ids += tokenizer.encode(text[at:], add_special_tokens=False)
    return ids + after


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the special tokens that the model wants before a prompt and after it."""
    inner = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a", add_special_tokens=True)
    at = next((i for i in range(len(whole)) if whole[i : i + len(inner)] == inner), 0)
    return whole[:at], whole[at + len(inner) :]


async def encode(
    tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True, literals: Ranges = ()
) -> list[int]:
    """`encode_now` without holding up the loop. Check the text's length first. Raises InvalidRequest (503) for a long
    text while too many wait.
    """
    work = partial(encode_now, tokenizer, text, add_special_tokens=add_special_tokens, literals=literals)
    if len(text) <= INLINE_CHARS:
        return work()
    if len(text) > LONG_CHARS:
        return await asyncio.wrap_future(_long.submit(len(text), work))
    return await asyncio.get_running_loop().run_in_executor(_medium, work)


async def encode_each(tokenizer: Tokenizer, texts: Iterable[Text]) -> AsyncIterator[tuple[Text, list[int]]]:
    """Yield each text with its tokens, as soon as it has them; equal ones once. Other work goes on between any two."""
    inline = 0
    for text in dict.fromkeys(texts):
        length = len(text.text)
        if length <= INLINE_CHARS:
            inline += length
            if inline > INLINE_CHARS:
                inline = length
                await asyncio.sleep(0)
        yield text, await encode(tokenizer, text.text, add_special_tokens=text.special, literals=text.literals)


async def encode_all(tokenizer: Tokenizer, texts: Iterable[Text]) -> Mapping[Text, list[int]]:
    """Return the tokens of each text, as `encode_each` brings them."""
    return {text: ids async for text, ids in encode_each(tokenizer, texts)}
