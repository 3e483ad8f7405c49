"""Groups of KV: which layers of a model have pages of their own, because they read a window of the newest tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from pegboard.core.interfaces.layers import KVGroupSpec, KVKind

if TYPE_CHECKING:
    from pegboard.core.interfaces.layers import LayerSpec
    from pegboard.core.interfaces.model_family import ModelContext

SERVICE = "window_pages"
"""Name in `ModelContext.services`, there if families are to give layers with a window groups of their own."""


def window_groups(windows: Iterable[int | None], max_context_len: int, ctx: ModelContext) -> tuple[int, ...]:
    """Return the window (tokens) of each group after the first, for layers with these windows. None where no plugin
    serves such groups. A window of the whole context forgets nothing, and stays in the first group.
    """
    if SERVICE not in ctx.services:
        return ()
    return tuple(sorted({window for window in windows if window is not None and window < max_context_len}))


def grouped(layers: Iterable[LayerSpec], windows: tuple[int, ...]) -> tuple[LayerSpec, ...]:
    """Return layers with their groups: those with window `windows[i]` are in group i + 1, all others in group 0."""
    return tuple(
        replace(layer, kv_group=windows.index(layer.window) + 1) if layer.window in windows else layer
        for layer in layers
    )


def groups_of(layers: Iterable[LayerSpec]) -> tuple[KVGroupSpec, ...]:
    """Return the groups of a model's layers, the first one with all that have none of their own."""
    found: list[list[LayerSpec]] = [[]]
    for layer in layers:
        while layer.kv_group >= len(found):
            found.append([])
        found[layer.kv_group].append(layer)
    ids = [tuple(layer.layer_id for layer in group) for group in found]
    windows = [KVGroupSpec(KVKind.WINDOW, own, group[0].window) for own, group in zip(ids[1:], found[1:], strict=True)]
    return (KVGroupSpec(KVKind.FULL, ids[0]), *windows)
