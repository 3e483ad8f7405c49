"""Namespaces: what keeps KV of equal tokens apart, composed of what each gate adds and of the client's own part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pegboard.core.interfaces.keys import PrefixMemo

if TYPE_CHECKING:
    from pegboard.core.interfaces.req import Req

MAX_LENGTH = 1024
"""Characters that a gate's part may have."""


def composed(parts: Mapping[str, str], own: str) -> str:
    """Return the namespace of a request to which gates have added `parts`, by the gate's name, and whose client has
    its `own`. Two are equal only where all parts are: each is framed by its name and length, in the order of names.
    """
    return "".join(f"{name}={len(parts[name])}:{parts[name]}/" for name in sorted(parts)) + own


def move(req: Req, namespace: str) -> None:
    """Put a request that has no KV yet into another namespace."""
    if namespace == req.namespace:
        return
    req.namespace = namespace
    req.memo = PrefixMemo()  # a memo stays in one namespace
