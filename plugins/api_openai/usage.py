"""How many tokens it took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

if TYPE_CHECKING:
    from pegboard.toolkit.http.generation import Answer


class PromptDetails(BaseModel):
    """Of the prompt's tokens."""

    cached_tokens: int
    """Those that were computed for an earlier request."""
    image_tokens: int | None = None
    """Those of pictures, where there are any; the same of videos."""
    video_tokens: int | None = None


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
    found["prompt_tokens_details"] |= media_details(prompts)
    found |= {"completion_tokens": completion, "total_tokens": found["prompt_tokens"] + completion}
    if reasoning_tokens is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return found


def media_details(answers: Sequence[Answer]) -> dict[str, int]:
    """Return how many tokens the media of these prompts take; nothing for a kind that none has."""
    kinds = sorted({kind for one in answers for kind in one.media_tokens})
    return {f"{kind}_tokens": sum(one.media_tokens.get(kind, 0) for one in answers) for kind in kinds}


def prompt_usage(prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """`usage` where nothing is generated."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 0,
        "total_tokens": prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
