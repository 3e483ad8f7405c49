"""For chat APIs: how much a model is to think."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.parsing.output_parser import reasoning_parser_of
from pegboard.toolkit.parsing.thoughts import Watch

if TYPE_CHECKING:
    from pegboard.core.interfaces.api_router import ApiContext
    from pegboard.toolkit.chat.turn import Turn

BUDGET = "thought_budget"
"""The feature of engines, and what requests call it in their `params`."""


def effort_hints(effort: str | None) -> dict[str, object]:
    """Return what `reasoning_effort` is to chat templates that know of such a thing."""
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"} if effort else {}


def budget_params(
    ctx: ApiContext, turn: Turn, tokens: int | None, name: str, *, wish: bool = False
) -> dict[str, object]:
    """Return what the `params` of a request have where its answer may think for `tokens` tokens at most; None: as many
    as it likes. An answer that a grammar describes has no thought, nor has one whose prefill has begun to answer.
    Raises InvalidRequest, by the field's `name`, where this server cannot end thoughts; where the budget is a `wish`,
    it is then left out.
    """
    if tokens is None:
        return {}
    if tokens < 0:
        raise InvalidRequest(f"{name} must be at least 0, got {tokens}", param=name)
    parser = reasoning_parser_of(ctx)
    form = None if parser is None else parser.thought_form(prompt=turn.before_prefill)
    if form is None or BUDGET not in ctx.client.info.features:
        if wish:
            return {}
        why = "it has no plugin that does" if form else "no reasoning parser fits this model's chat template"
        raise InvalidRequest(f"{name}: this server cannot end thoughts: {why}", param=name, code="unsupported")
    if turn.constrained:
        return {}
    # Not the prefill itself, which may be longer than `params` may be.
    watch = Watch(form, turn.prefill)
    if watch.over:
        return {}
    form = dataclasses.replace(form, opened=watch.thinking)
    said = {key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(form).items()}
    return {BUDGET: {**said, "tokens": tokens, "text": watch.rest}}
