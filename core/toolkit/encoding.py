"""Text to tokens beside an event loop. The tokenizer works without the interpreter's lock, so one thread per lane is
enough: long texts go one at a time and do not keep shorter ones waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import InvalidRequest

if TYPE_CHECKING:
    from pegboard.core.interfaces.tokenizer import Tokenizer

INLINE_CHARS = 2048
"""Up to so many characters take about a millisecond; a thread would take as long to wake up."""
LONG_CHARS = 64 * 1024
CHARS_PER_TOKEN = 32
"""Text longer than this times the context is refused before it is tokenised. Prose has 3 to 6 characters per token, and
code with long runs of spaces under 20."""

Text = tuple[str, bool]
"""A text, and whether the model's own special tokens are added around it."""

_medium = ThreadPoolExecutor(1, "tokenise")
_long = ThreadPoolExecutor(1, "tokenise-long")


def check_length(text: str, context: int, param: str = "prompt") -> None:
    """Raise InvalidRequest for a text that cannot fit into a context of so many tokens."""
    if len(text) > context * CHARS_PER_TOKEN:
        raise InvalidRequest(
            f"{param} has {len(text)} characters; they cannot fit into a context of {context} tokens",
            param=param,
            code="context_length_exceeded",
        )


async def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """`Tokenizer.encode` without holding up the loop. Check the text's length first."""
    if len(text) <= INLINE_CHARS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    lane = _medium if len(text) <= LONG_CHARS else _long
    work = partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)
    return await asyncio.get_running_loop().run_in_executor(lane, work)


async def encode_each(tokenizer: Tokenizer, texts: Iterable[Text]) -> AsyncIterator[tuple[Text, list[int]]]:
    """Each text with its tokens, as soon as it has them; equal ones once. Other work goes on between any two."""
    inline = 0
    for text, special in dict.fromkeys(texts):
        if len(text) <= INLINE_CHARS:
            inline += len(text)
            if inline > INLINE_CHARS:
                inline = len(text)
                await asyncio.sleep(0)
        yield (text, special), await encode(tokenizer, text, add_special_tokens=special)


async def encode_all(tokenizer: Tokenizer, texts: Iterable[Text]) -> Mapping[Text, list[int]]:
    """The tokens of each text, as `encode_each` brings them."""
    return {text: ids async for text, ids in encode_each(tokenizer, texts)}
