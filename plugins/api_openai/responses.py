"""Answers in OpenAI's shapes. One writer per kind of completion; both write whole answers and chunks of a stream."""

from __future__ import annotations

import abc
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import OutputChunk
    from pegboard.core.interfaces.tokenizer import Tokenizer
    from pegboard.core.toolkit.generation import Answer

Logprob = tuple[float, int, list[tuple[float, int]]]


def usage(answers: Sequence[Answer], n: int) -> dict[str, Any]:
    """Tokens of all answers. A prompt counts once, however many answers it has."""
    prompts = answers[::n]
    prompt, completion = sum(one.prompt_tokens for one in prompts), sum(one.completion_tokens for one in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in prompts)},
    }


class Writer(abc.ABC):
    """Writes the bodies of one HTTP request. `want_logprobs` is the number of top ones, None for none at all."""

    kind = ""
    chunk_kind = ""

    def __init__(self, rid: str, model: str, tokenizer: Tokenizer, want_logprobs: int | None) -> None:
        self._tokenizer = tokenizer
        self._top = want_logprobs
        self._head = {"id": rid, "created": int(time.time()), "model": model}

    @abc.abstractmethod
    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """One finished choice."""

    @abc.abstractmethod
    def delta(self, index: int, text: str, chunk: OutputChunk | None, first: bool) -> dict[str, Any]:
        """A choice of a stream: new text and the chunk's logprobs; without a chunk, the choice's beginning."""

    def opens(self, index: int) -> bool:
        """Whether a streamed choice begins with a chunk of its own, before any token."""
        return True

    def body(self, answers: Sequence[Answer], n: int) -> dict[str, Any]:
        """The whole answer."""
        choices = [self.choice(index, answer) for index, answer in enumerate(answers)]
        return {**self._head, "object": self.kind, "choices": choices, "usage": usage(answers, n)}

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """One chunk of a stream."""
        return {**self._head, "object": self.chunk_kind, "choices": choices, **more}

    def finish(self, reason: dict[str, Any] | None) -> dict[str, Any]:
        """`finish_reason`, and what matched where the output was stopped."""
        if reason is None:
            return {"finish_reason": None}
        return {"finish_reason": reason.get("type", "stop"), "matched_stop": reason.get("matched")}

    def token(self, token_id: int) -> str:
        """A token's text; part of a character shows as U+FFFD."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


class ChatWriter(Writer):
    """Bodies of `/v1/chat/completions`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer.text},
            "logprobs": self._logprobs(answer.logprobs),
            **self.finish(answer.finish_reason),
        }

    def delta(self, index: int, text: str, chunk: OutputChunk | None, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
        return {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(chunk.logprobs) if chunk is not None else None,
            **self.finish(chunk.finish_reason if chunk is not None else None),
        }

    def _logprobs(self, entries: Sequence[Logprob] | None) -> dict[str, Any] | None:
        if self._top is None or entries is None:
            return None
        return {
            "content": [
                {**self._one(value, token), "top_logprobs": [self._one(*other) for other in top[: self._top]]}
                for value, token, top in entries
            ]
        }

    def _one(self, value: float, token_id: int) -> dict[str, Any]:
        text = self.token(token_id)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}


class CompletionWriter(Writer):
    """Bodies of `/v1/completions`. `echoes` holds, per choice, the prompt's text that goes before the answer."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(
        self, rid: str, model: str, tokenizer: Tokenizer, want_logprobs: int | None, echoes: Sequence[str]
    ) -> None:
        super().__init__(rid, model, tokenizer, want_logprobs)
        self._echoes = echoes
        self._offsets = [0] * len(echoes)

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        return {
            "index": index,
            "text": self._echoes[index] + answer.text,
            "logprobs": self._logprobs(index, answer.logprobs),
            **self.finish(answer.finish_reason),
        }

    def delta(self, index: int, text: str, chunk: OutputChunk | None, first: bool) -> dict[str, Any]:
        return {
            "index": index,
            "text": self._echoes[index] + text if first else text,
            "logprobs": self._logprobs(index, chunk.logprobs) if chunk is not None else None,
            **self.finish(chunk.finish_reason if chunk is not None else None),
        }

    def opens(self, index: int) -> bool:
        return bool(self._echoes[index])

    def _logprobs(self, index: int, entries: Sequence[Logprob] | None) -> dict[str, Any] | None:
        if self._top is None or entries is None:
            return None
        tokens = [self.token(token_id) for _, token_id, _ in entries]
        offsets = []
        for text in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        tops = [{self.token(other): lp for lp, other in top[: self._top]} for _, _, top in entries]
        return {
            "tokens": tokens,
            "token_logprobs": [value for value, _, _ in entries],
            "top_logprobs": tops if self._top else None,
            "text_offset": offsets,
        }


def model_card(name: str, created: int, max_context_len: int) -> dict[str, Any]:
    """One entry of `/v1/models`."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "pegboard",
        "root": name,
        "max_model_len": max_context_len,
    }
