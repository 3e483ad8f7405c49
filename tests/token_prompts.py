"""Prompts of token ids, in requests that may have others."""

from __future__ import annotations

from pegboard.core.interfaces.client import GenerateRequest


def prompt_ids(request: GenerateRequest) -> list[int]:
    """The ids that a request's prompt consists of."""
    assert isinstance(request.prompt, list)
    return request.prompt
