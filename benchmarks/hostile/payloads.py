"""Requests meant to hurt, as paths and bodies: each is allowed by every bound on a single field.

The sizes are arguments: `attacks` sends them at the bounds, tests and the soak send smaller ones.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pegboard.tools.bench.words import WORDS

MEGABYTE = 2**20
LARGEST_BODY = 16 * MEGABYTE
"""The default of `server.max_body_bytes` when these attacks were found."""
MAX_TOP, MAX_IDS, MAX_N = 128, 4096, 1024
"""Bounds of one request of the native API: `top_logprobs_num`, `token_ids_logprob`, prompts times `n`."""
STOPS, STOP_LENGTH, PATTERNS = 64, 1024, 16
"""Bounds of stop strings and stop expressions."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: where it goes, and its body."""

    path: str
    body: bytes


def ask(path: str, **fields: Any) -> Ask:
    """Return a request with this JSON object as its body."""
    return Ask(path, json.dumps(fields, separators=(",", ":")).encode())


def generate(prompt: str | Sequence[int] | Sequence[Sequence[int]], sampling: dict[str, Any], **fields: Any) -> Ask:
    """Return a request of the native API that goes on to its last token."""
    field = "text" if isinstance(prompt, str) else "input_ids"
    return ask("/generate", **{field: prompt}, sampling_params={"ignore_eos": True, **sampling}, **fields)


def prose(rng: random.Random, words: int) -> str:
    """Return words of English without much sense."""
    return " ".join(rng.choice(WORDS) for _ in range(words))


def some_ids(rng: random.Random, count: int, vocabulary: int = 300) -> list[int]:
    """Return token ids of three digits: all vocabularies have them, and a body holds many."""
    return rng.choices(range(100, vocabulary), k=count)


# ---- logprobs -------------------------------------------------------------------------------------------------------


def big_message(*, n: int = 64, tokens: int = 165, top: int = MAX_TOP, ids: int = MAX_IDS) -> Ask:
    """Return answers in step whose logprobs make one message of the scheduler's larger than 512 MiB."""
    return logprobs("Once upon a time", tokens=tokens, top=top, ids=ids, n=n)


def logprobs(
    prompt: str | Sequence[int],
    *,
    tokens: int,
    top: int = 0,
    ids: int = 0,
    n: int = 1,
    of_prompt: bool = False,
    stream: bool = False,
) -> Ask:
    """Return logprobs of `tokens` generated tokens, with `top` largest ones and those of `ids` token ids at each."""
    return generate(
        prompt,
        {"n": n, "max_new_tokens": tokens},
        return_logprob=True,
        top_logprobs_num=top,
        token_ids_logprob=list(range(ids)),
        stream=stream,
        **({"logprob_start_len": 0} if of_prompt else {}),
    )


# ---- texts ----------------------------------------------------------------------------------------------------------


def long_texts(rng: random.Random, characters: int = 2_000_000) -> dict[str, str]:
    """Texts of one length, by what they are made of; what they cost a tokenizer differs tenfold."""
    words = prose(rng, characters // 4)
    letter = rng.choice("aeiou")
    return {"words": words[:characters], "one character": letter * characters, "spaces": " " * characters}


def read_text(path: str, text: str) -> Ask:
    """Return a request in which this text is tokenised."""
    if path == "/generate":
        return generate(text, {"max_new_tokens": 1})
    more = {"max_tokens": 1} if path == "/v1/completions" else {}
    return ask(path, prompt=text, **more)


def stops(rng: random.Random, *, n: int = MAX_N, size: int = 64 * 1024) -> Ask:
    """About `size` bytes of stop strings and stop expressions, which each of `n` answers has."""
    expression = f"(?:{'|'.join(prose(rng, 1)[:3] for _ in range(4))})" + "[a-f]" * 40 + "x"
    patterns = [f"{number:02}{expression}" for number in range(PATTERNS)]
    left = size - sum(map(len, patterns)) - 300
    length = min(STOP_LENGTH, left // STOPS - 3)
    strings = [f"{number:02}{'ab' * STOP_LENGTH}"[:length] for number in range(STOPS)]
    sampling = {"n": n, "max_new_tokens": 1, "stop": strings, "stop_regex": patterns}
    return generate("Once upon a time", sampling)


# ---- bodies ---------------------------------------------------------------------------------------------------------


def bodies(size: int = LARGEST_BODY) -> dict[str, Ask]:
    """Bodies of `size` bytes that are cheap to write and dear to read."""
    return {
        "objects": _filled("/v1/chat/completions", '{"messages":[', "{},", "{}]}", size),
        "brackets": _filled("/v1/chat/completions", '{"messages":', "[", "", size),
        "numbers": _filled("/generate", '{"input_ids":[', "1,", "1]}", size),
        "objects in params": _filled("/generate", '{"text":"a","params":{"a":[', "{},", "{}]}}", size),
    }


def _filled(path: str, head: str, unit: str, tail: str, size: int) -> Ask:
    return Ask(path, (head + unit * ((size - len(head) - len(tail)) // len(unit)) + tail).encode())


# ---- many -----------------------------------------------------------------------------------------------------------


def small_request(rng: random.Random, tokens: int = 8) -> Ask:
    """Return one of a crowd."""
    return generate(prose(rng, 12), {"max_new_tokens": tokens})


def long_ids(rng: random.Random, length: int, prompts: int = 1, tokens: int = 1) -> Ask:
    """Return prompts as token ids, no two of which begin alike. Several are one batch."""
    many = [some_ids(rng, length) for _ in range(prompts)]
    return generate(many[0] if prompts == 1 else many, {"max_new_tokens": tokens})


# ---- grammars -------------------------------------------------------------------------------------------------------

AMBIGUOUS = "root ::= (x | y | z)*\nx ::= [a-z]*\ny ::= [a-z ]*\nz ::= [ -~]*"
"""Compiled at once; each text has very many readings, which a matcher keeps apart."""


def ambiguous(*, n: int = 32, tokens: int = 200) -> Ask:
    """Return a grammar that reads each text in very many ways, at each token."""
    return generate("Once upon a time", {"n": n, "max_new_tokens": tokens, "ebnf": AMBIGUOUS})


def slow_grammar(number: int, rules: int = 3000) -> Ask:
    """Return a grammar that takes long to compile, a new one for each number. `rules` says how long."""
    chain = "".join(f'r{i} ::= "a" r{i + 1} | "b" r{i + 1} | [a-z]{{1,{i % 90 + 1}}} r{i + 1}\n' for i in range(rules))
    ebnf = f'root ::= "{number}" r0\n{chain}r{rules} ::= "x"'
    return generate("Once upon a time", {"max_new_tokens": 4, "ebnf": ebnf})


def quick_grammar(number: int) -> Ask:
    """Return one that is compiled at once, and that no cache has."""
    regex = f"(yes|no|maybe)[a-c]{{1,8}}{number}"
    return generate("Once upon a time", {"max_new_tokens": 24, "regex": regex, "temperature": 0.7})
