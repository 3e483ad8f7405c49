"""How many tokens it took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

if TYPE_CHECKING:
    from pegboard.core.toolkit.http.generation import Answer


class PromptDetails(BaseModel):
    """Of the prompt's tokens."""

    cached_tokens: int
    """Those that were computed for an earlier request."""


class CompletionDetails(BaseModel):
    """Of the answer's tokens."""

    reasoning_tokens: int
    """Those of the model's thinking."""


class Usage(BaseModel):
    """Tokens of all answers; a prompt counts once, however many answers it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


def usage(answers: Sequence[Answer], n: int, reasoning_tokens: int | None = None) -> dict[str, Any]:
    """`usage` of `n` answers to each prompt; those to one prompt follow each other."""
    prompts = answers[::n]
    completion = sum(one.completion_tokens for one in answers)
    found = prompt_usage(sum(one.prompt_tokens for one in prompts), sum(one.cached_tokens for one in prompts))
    found |= {"completion_tokens": completion, "total_tokens": found["prompt_tokens"] + completion}
    if reasoning_tokens is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return found


def prompt_usage(prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """`usage` where nothing is generated."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 0,
        "total_tokens": prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
