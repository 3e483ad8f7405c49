"""Answers of the native routes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import GenerateRequest, ModelInfo
    from pegboard.core.interfaces.tokenizer import Tokenizer
    from pegboard.core.toolkit.generation import Answer

Entry = tuple[float, int, str | None]

WEIGHT_VERSION = "default"
"""Weights do not change while a server runs, so far."""


class Responder:
    """Writes answers of one HTTP request."""

    def __init__(self, tokenizer: Tokenizer, *, text_in_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._texts = text_in_logprobs

    def answer(self, request: GenerateRequest, answer: Answer, latency: float) -> dict[str, Any]:
        """What is known of an answer so far; `latency` in seconds since the request came."""
        meta: dict[str, Any] = {
            "id": answer.rid,
            "finish_reason": _finish_reason(answer),
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "cached_tokens": answer.cached_tokens,
            "num_retractions": answer.num_retractions,
            "weight_version": WEIGHT_VERSION,
            "e2e_latency": latency,
        }
        if request.logprobs is not None:
            self._add_logprobs(meta, request, answer)
        return {"text": answer.text, "output_ids": answer.token_ids, "meta_info": meta}

    def _add_logprobs(self, meta: dict[str, Any], request: GenerateRequest, answer: Answer) -> None:
        top = request.logprobs or 0
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [self._entry(value, token) for value, token, _ in answer.logprobs]
        if top:
            meta["output_top_logprobs"] = [[self._entry(*one) for one in more[:top]] for _, _, more in answer.logprobs]
        if request.token_ids_logprob:
            # They follow the top ones.
            meta["output_token_ids_logprobs"] = [
                [self._entry(*one) for one in more[top:]] for _, _, more in answer.logprobs
            ]

    def _entry(self, value: float, token: int) -> Entry:
        text = self._tokenizer.decode([token], skip_special_tokens=False) if self._texts else None
        return value, token, text


def _finish_reason(answer: Answer) -> dict[str, Any] | None:
    reason = answer.finish_reason
    if reason is not None and reason.get("type") == "length":
        return {**reason, "length": answer.completion_tokens}
    return reason


def model_info(info: ModelInfo, tokenizer: Tokenizer) -> dict[str, Any]:
    """Body of `/model_info`."""
    return {
        "model_path": info.path,
        "tokenizer_path": info.path,
        "served_model_name": info.served_name,
        "is_generation": True,
        "architecture": info.architecture,
        "dtype": info.dtype,
        "weight_version": WEIGHT_VERSION,
        "max_context_length": info.max_context_len,
        "max_total_num_tokens": info.max_total_tokens,
        "vocab_size": info.vocab_size,
        "has_chat_template": tokenizer.has_chat_template,
    }


def load(scheduler: dict[str, Any]) -> dict[str, Any]:
    """One entry of `/v1/loads`, from the scheduler's counters."""
    waiting, running = scheduler.get("waiting_requests", 0), scheduler.get("running_requests", 0)
    return {
        "dp_rank": 0,
        "num_reqs": waiting + running,
        "num_waiting_reqs": waiting,
        "num_tokens": scheduler.get("total_tokens", 0) - scheduler.get("free_tokens", 0),
    }
