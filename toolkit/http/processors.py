"""For API plugins: the logits processors that a body asks for, with their parameters."""

from __future__ import annotations

from typing import Any

from pegboard.core.interfaces.errors import InvalidRequest


def processors_of(chosen: Any, params: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the parameters of each logits processor that a body asks for, by processor name.

    `chosen` is its `custom_logit_processor`: a name, ``{"name": ..., "params": {...}}``, or a list of these; `params`
    its `custom_params`, for the one that is named, or by name for several. Raises InvalidRequest where it is neither,
    or where parameters stand in two places or are for no processor.
    """
    field = f"{prefix}custom_logit_processor"
    if not chosen:
        return params
    several = isinstance(chosen, list)
    found: dict[str, Any] = {}
    left = dict(params)
    for one in chosen if several else [chosen]:
        entry = {"name": one} if isinstance(one, str) else one
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not name or set(entry) - {"name", "params"}:
            raise InvalidRequest(
                f'{field} takes names of logits processors, or {{"name": ..., "params": {{...}}}}, and no code',
                param=field,
            )
        if name in found:
            raise InvalidRequest(f"{field} names {name[:64]!r} twice", param=field)
        own = entry.get("params")
        if own is None:
            own = left.pop(name, {}) if several else left
            left = left if several else {}
        if not isinstance(own, dict):
            raise InvalidRequest(f"{field}: the params of {name[:64]!r} must be an object", param=field)
        found[name] = own
    if left:
        names = ", ".join(map(repr, left))[:128]
        raise InvalidRequest(
            f"{prefix}custom_params has {names}, but the processors that {field} names have their parameters, or are "
            "others",
            param=f"{prefix}custom_params",
        )
    return found
