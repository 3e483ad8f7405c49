"""Which layers have pages of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from pegboard.conformance.attention.batches import make_layer
from pegboard.core.interfaces.layers import KVGroupSpec, KVKind
from pegboard.core.interfaces.model_family import ModelContext
from pegboard.toolkit.cache.windows import most_pages, reach
from pegboard.toolkit.model.kv_groups import SERVICE, grouped, groups_of, window_groups

WITHOUT = ModelContext(Path("x"), {}, torch.float32, torch.device("cpu"))
WITH = replace(WITHOUT, services={SERVICE: True})
WINDOWS = (8, None, 4, 8, 100)
LAYERS = tuple(make_layer(layer_id=number, window=window) for number, window in enumerate(WINDOWS))


def test_there_is_one_group_where_no_plugin_serves_more() -> None:
    assert window_groups(WINDOWS, 64, WITHOUT) == ()
    assert grouped(LAYERS, ()) == LAYERS
    assert groups_of(LAYERS) == (KVGroupSpec(KVKind.FULL, (0, 1, 2, 3, 4)),)


def test_each_window_has_a_group_but_that_of_the_whole_context() -> None:
    windows = window_groups(WINDOWS, 100, WITH)
    layers = grouped(LAYERS, windows)
    assert windows == (4, 8)
    assert [layer.kv_group for layer in layers] == [2, 0, 1, 2, 0]
    groups = [KVGroupSpec(KVKind.WINDOW, (2,), 4), KVGroupSpec(KVKind.WINDOW, (0, 3), 8)]
    assert groups_of(layers) == (KVGroupSpec(KVKind.FULL, (1, 4)), *groups)


def test_the_first_group_may_have_no_layers() -> None:
    layers = grouped(LAYERS[:1], (8,))
    assert groups_of(layers) == (KVGroupSpec(KVKind.FULL, ()), KVGroupSpec(KVKind.WINDOW, (0,), 8))


def test_pages_that_are_read() -> None:
    """All that a token at any place of a page sees, when the step before may not be through yet."""
    for window in range(1, 40):
        for size in (1, 3, 16):
            assert (reach(window, size) - 1) * size < window - 1 <= reach(window, size) * size
            for done in range(200, 240):
                first, last = max(0, done - window + 1) // size, (done + 1) // size
                assert done // size - reach(window, size) <= first
                assert last - (done // size - reach(window, size)) + 1 <= most_pages(window, size)
