"""The attacks: each a few lines that say what its clients send, by the item of issue 13 that it belongs to."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from benchmarks.hostile import media, payloads
from benchmarks.hostile.payloads import Ask


@dataclass(frozen=True, slots=True)
class Attack:
    """What one client of an attack does until its time is over: sends `asks`, one behind the other, again and again."""

    name: str
    item: int | str
    """Of issue 13, or of another one."""
    what: str
    asks: Callable[[random.Random, float], Iterable[Ask]] = lambda rng, scale: ()
    """At a scale of 1 with every field at its bound; a smaller one shrinks what multiplies."""
    at_once: int = 1
    """Requests that a client has under way."""
    leave_after: float | None = None
    """Seconds after which it closes a connection in the middle of the answer; None: it reads to the end."""
    idle: int = 0
    """Connections that it opens, uses once and leaves idle."""
    pause: float = 0.1
    """Seconds that it waits after a request that was refused: it is not the number of requests that attacks."""
    tail: float = 5.0
    """Seconds for which the others are watched when the attack is over."""
    beside: str = ""
    """A further honest client."""
    is_media: bool = False
    """Whether it needs a model that takes pictures."""

    def endless(self, rng: random.Random, scale: float = 1.0) -> Iterator[Ask]:
        """Return what a client sends."""
        return itertools.cycle(list(self.asks(rng, scale)))


def _long_text(rng: random.Random, scale: float) -> list[Ask]:
    texts = payloads.long_texts(rng, int(2_000_000 * scale))
    paths = ("/v1/completions", "/tokenize", "/generate")
    asks = [payloads.read_text(path, text) for text in texts.values() for path in paths]
    rng.shuffle(asks)
    return asks


def _prompt_logprobs(rng: random.Random, scale: float) -> list[Ask]:
    prompts = [payloads.some_ids(rng, int(8000 * max(scale, 1 / 8))) for _ in range(20)]
    sizes = {"top": int(128 * scale), "ids": int(4096 * scale)}
    return [payloads.logprobs(prompt, tokens=1, **sizes, of_prompt=True) for prompt in prompts]  # type: ignore[arg-type]


def _bodies(rng: random.Random, scale: float) -> list[Ask]:
    asks = list(payloads.bodies(int(payloads.LARGEST_BODY * scale)).values())
    rng.shuffle(asks)
    return asks


def _of_media() -> Iterator[Attack]:
    """Yield attacks on a model that takes pictures, beside a client with small ones of its own."""
    several: dict[str, tuple[str, str, Callable[[float], Ask]]] = {
        "picture_scans": (
            "F1",
            "JPEGs of 292 KB with 300 scans more than they need",
            lambda scale: media.scans(count=int(300 * scale)),
        ),
        "picture_pixels": ("F1", "PNGs of 67 million pixels in 261 KB", lambda scale: media.many_pixels()),
        "picture_chunks": (
            "F1",
            "small PNGs with 500,000 comments",
            lambda scale: media.many_chunks(int(500_000 * scale)),
        ),
        "body_escapes": (
            "F3",
            "addresses of 60 MiB of escapes, beside a number that is parsed twice",
            lambda scale: media.escapes(int(media.LARGEST_BODY * scale)),
        ),
        "body_line_ends": (
            "F3",
            "addresses of 60 MiB of escaped line ends",
            lambda scale: media.line_ends(int(media.LARGEST_BODY * scale)),
        ),
    }
    for name, (item, what, ask) in several.items():
        yield Attack(
            name,
            f"{item} of issue 29",
            what,
            lambda rng, scale, ask=ask: [ask(scale)],  # type: ignore[misc]
            beside="pictures",
            is_media=True,
        )


ATTACKS = {
    one.name: one
    for one in (
        Attack(
            "big_message",
            1,
            "n 64, 165 tokens, top 128 and 4,096 token ids: one message of the scheduler's over 512 MiB",
            lambda rng, scale: [payloads.big_message(n=int(64 * scale), ids=int(4096 * scale))],
        ),
        Attack(
            "logprob_streams",
            2,
            "streams with top 128 and 4,096 token ids at each token, whose clients leave after ten seconds",
            lambda rng, scale: [
                payloads.logprobs(
                    payloads.prose(rng, 20), tokens=int(4000 * scale), top=128, ids=int(4096 * scale), stream=True
                )
            ],
            leave_after=10.0,
            tail=20.0,
        ),
        Attack(
            "long_text", 3, "2 million characters to tokenise: words, one character, spaces; three routes", _long_text
        ),
        Attack(
            "stops",
            4,
            "64 KiB of stop strings and expressions, n 1,024",
            lambda rng, scale: [payloads.stops(rng, n=int(1024 * scale))],
        ),
        Attack("bodies", 5, "16 MiB of `{}`, `[` and `1,`", _bodies, pause=0.5),
        Attack(
            "logprobs",
            6,
            "1,000 tokens with 4,096 token ids each, not streamed",
            lambda rng, scale: [payloads.logprobs(payloads.prose(rng, 20), tokens=1000, ids=int(4096 * scale))],
        ),
        Attack(
            "prompt_logprobs",
            6,
            "top 128 and 4,096 token ids at each of 8,000 tokens of a prompt",
            _prompt_logprobs,
        ),
        Attack(
            "queue",
            7,
            "500 small requests at once",
            lambda rng, scale: [payloads.small_request(rng) for _ in range(500)],
            at_once=125,
            pause=5.0,
        ),
        Attack(
            "queue_ids",
            7,
            "2,000 prompts of 4,000 token ids at once",
            lambda rng, scale: [payloads.long_ids(rng, 4000) for _ in range(500)],
            at_once=500,
            pause=20.0,
        ),
        Attack(
            "queue_batches",
            7,
            "batches of 512 prompts of 8,000 token ids, in bodies of 16 MiB",
            lambda rng, scale: [payloads.long_ids(rng, 8000, prompts=int(512 * scale))],
            pause=0.5,
        ),
        Attack(
            "grammar_ambiguous",
            8,
            "an ambiguous grammar with n 32",
            lambda rng, scale: [payloads.ambiguous(n=max(1, int(32 * scale)))],
        ),
        Attack(
            "grammar_slow",
            8,
            "24 grammars that take ten seconds to compile, beside a client with quick ones",
            lambda rng, scale: [payloads.slow_grammar(rng.randrange(10**9)) for _ in range(200)],
            at_once=6,
            beside="grammars",
        ),
        Attack("idle", 10, "4,400 idle connections, of 4,096 that there may be", idle=1100),
        *_of_media(),
    )
}
