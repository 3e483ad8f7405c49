"""Loads on an asynchronous device, whose streams only write down what is queued."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pegboard.core.interfaces.step import StepLost
from pegboard.plugins.kv_tiers.api import PageLoad
from pegboard.plugins.kv_tiers.loading import HostLoads, Loading

CUDA = torch.device("cuda", 0)


@contextmanager
def loading_for(loads: Sequence[PageLoad], host: HostLoads, *, ahead: bool) -> Iterator[Loading]:
    """Load while a batch runs, as the device part does."""
    loading = host.begin(loads, ahead=ahead)
    try:
        yield loading
    finally:
        loading.end()


class Stream:
    """Events are places in its queue; `waited` is how much of the other stream's queue this one waits for."""

    device = CUDA

    def __init__(self) -> None:
        self.queue: list[str] = []
        self.waited = 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def record_event(self) -> int:
        return len(self.queue)

    def wait_event(self, event: int) -> None:
        self.waited = max(self.waited, event)

    def wait_stream(self, other: Stream) -> None:
        self.waited = max(self.waited, len(other.queue))


@pytest.mark.parametrize("failing", [None, 0, 1, 2])
def test_pages_are_given_away_when_nothing_queued_writes_to_them(
    failing: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a layer whose keys were queued before its values failed, for want of memory."""
    loads, compute = Stream(), Stream()

    def load(pool: Any, layer: int, host: torch.Tensor, device: torch.Tensor) -> None:
        loads.queue.append(f"keys of {layer}")
        if layer == failing:
            raise torch.cuda.OutOfMemoryError("no room for values")
        loads.queue.append(f"values of {layer}")

    monkeypatch.setattr(torch, "Stream", lambda device: loads)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: compute)
    host: Any = SimpleNamespace(page_size=1, layers=(), dtype=None, bytes_per_token=lambda *_: 1, load=load)
    pool: Any = SimpleNamespace(layer_ids=(0, 1, 2))
    pages: Any = SimpleNamespace(host=np.array([1]), device=np.array([7]))
    seen = []
    try:
        with loading_for([pages], HostLoads(host, pool, CUDA), ahead=True) as watch:
            for layer in pool.layer_ids:
                watch.before(layer)
                seen.append(compute.waited)
    except StepLost:
        assert failing is not None
    assert seen == [2, 4, 6][:failing], "each layer is waited for before it is computed"
    assert compute.waited == len(loads.queue)
