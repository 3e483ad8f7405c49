"""Log-probabilities in OpenAI's shapes: entries of a chat, columns of a completion, and vLLM's of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from pegboard.toolkit.text.token_text import Offsets

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import Logprob
    from pegboard.toolkit.text.token_text import TokenTexts


def chat_logprobs(texts: TokenTexts, entries: Sequence[Logprob], top: int) -> dict[str, Any]:
    """`logprobs` of a chat's choice: one entry per token, each with its `top` largest ones."""

    def one(value: float | None, token: int) -> dict[str, object]:
        return {"token": texts.text(token), "logprob": finite(value), "bytes": list(texts.raw(token))}

    content = [
        {**one(value, token), "top_logprobs": [one(*other) for other in others[:top]]}
        for value, token, others in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`logprobs` of one completion's choice, as columns; in a stream piece by piece, with offsets that go on."""

    def __init__(self, texts: TokenTexts, top: int, *, skip_special_tokens: bool) -> None:
        self._texts = texts
        self._top = top
        self._offsets = Offsets(texts, skip_special_tokens=skip_special_tokens)

    def columns(self, entries: Sequence[Logprob]) -> dict[str, object]:
        """Of the next tokens. The first one of a prompt has no logprob."""
        tops = [self._largest(value, token, others) for value, token, others in entries]
        return {
            "tokens": [self._texts.text(token) for _, token, _ in entries],
            "token_logprobs": [finite(value) for value, _, _ in entries],
            "top_logprobs": tops if self._top else None,
            "text_offset": [self._offsets.next(token) for _, token, _ in entries],
        }

    def _largest(self, value: float | None, token: int, others: Sequence[tuple[float, int]]) -> dict[str, float] | None:
        """Return the largest ones by text, and the token's own, which need not be among them."""
        if value is None:
            return None
        found: dict[str, float] = {}
        for other_value, other in [*others[: self._top], (value, token)]:
            # Two tokens may have one text; the likelier one comes first.
            found.setdefault(self._texts.text(other), finite(other_value))
        return found


def prompt_logprobs(texts: TokenTexts, entries: Sequence[Logprob], top: int) -> list[dict[str, object] | None]:
    """vLLM's `prompt_logprobs`: per token of the prompt, by token id, its own and the `top` largest; null for the
    first. Ranks are known of the largest ones only.
    """
    return [_by_id(texts, entry, top) for entry in entries]


def _by_id(texts: TokenTexts, entry: Logprob, top: int) -> dict[str, object] | None:
    value, token, others = entry
    if value is None:
        return None
    ranked: list[tuple[float, int, int | None]] = [
        (other_value, other, rank) for rank, (other_value, other) in enumerate(others[:top], 1)
    ]
    if all(other != token for _, other, _ in ranked):
        rank = next((rank for rank, (_, other) in enumerate(others, 1) if other == token), None)
        ranked.insert(0, (value, token, rank))
    return {
        str(other): {"logprob": finite(one), "rank": rank, "decoded_token": texts.text(other)}
        for one, other, rank in ranked
    }


LOWEST = -9999.0


@overload
def finite(value: float) -> float: ...


@overload
def finite(value: float | None) -> float | None: ...


def finite(value: float | None) -> float | None:
    """Return a logprob that JSON can say: OpenAI writes -9999.0 for what cannot happen."""
    return value if value is None or value > LOWEST else LOWEST
