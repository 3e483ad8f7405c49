"""Layers of a cached prefix arrive one by one: what is computed waits for its own layer, and pages are free again once
nothing writes to them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pegboard.conformance.rig.paged import PlainPool
from pegboard.core.interfaces.forward import ForwardMode
from pegboard.core.interfaces.kv_pool import KVPool, KVPoolContext
from pegboard.core.interfaces.layers import LayerSpec
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.step import StepLost
from pegboard.plugins.kv_tiers.api import HostPool, HostPoolContext, PageLoad
from pegboard.plugins.kv_tiers.loading import HostLoads, WatchedAttention
from pegboard.plugins.kv_tiers.part import TierPart
from tests.plugins.kv_tiers.test_loading import loading_for

LAYERS = tuple(LayerSpec(layer_id, 2, 1, 4, 4, 1.0) for layer_id in (0, 1, 2))
PAGES = PageLoad(1, np.array([3, 4]), np.array([1, 2]))


class SlowHost(HostPool[NoOptions]):
    """Loads a layer once it is let through; fails at `fails_at`."""

    def __init__(self) -> None:
        super().__init__(NoOptions(), HostPoolContext(4, 1, LAYERS, torch.float32, torch.device("cpu")))
        self.may = {layer.layer_id: threading.Event() for layer in LAYERS}
        self.fails_at: int | None = None
        self.loaded: list[int] = []

    def let(self, *layer_ids: int) -> None:
        for layer_id in layer_ids:
            self.may[layer_id].set()

    def load(self, pool: KVPool, layer_id: int, host: torch.Tensor, device: torch.Tensor) -> None:
        assert self.may[layer_id].wait(10)
        if layer_id == self.fails_at:
            raise OSError("bad memory")
        pool.keys(layer_id)[device] = host[:, None, None].float()
        self.loaded.append(layer_id)

    def save(self, pool: KVPool, device: torch.Tensor, host: torch.Tensor) -> None: ...
    def write_block(self, host: torch.Tensor, out: memoryview) -> None: ...
    def read_block(self, data: memoryview, host: torch.Tensor) -> None: ...

    @property
    def nbytes(self) -> int:
        return 0


@pytest.fixture
def host() -> SlowHost:
    return SlowHost()


@pytest.fixture
def pool() -> KVPool:
    return PlainPool(None, KVPoolContext(8, 1, LAYERS, torch.float32, torch.device("cpu")))


@pytest.fixture
def loads(host: SlowHost, pool: KVPool) -> Iterator[HostLoads]:
    made = HostLoads(host, pool, torch.device("cpu"))
    yield made
    host.let(0, 1, 2)
    made.close()


class Recorder:
    """Attention that notes what was loaded when it was called."""

    def __init__(self, host: SlowHost) -> None:
        self.host = host
        self.seen: list[list[int]] = []

    def forward(self, *args: Any, **more: Any) -> torch.Tensor:
        self.seen.append(self.host.loaded.copy())
        return torch.zeros(1)


def test_attention_waits_for_its_own_layer_and_for_no_other(host: SlowHost, loads: HostLoads) -> None:
    nothing: Any = None
    attention = Recorder(host)
    with loading_for([PAGES], loads, ahead=True) as loading:
        watched = WatchedAttention(attention, loading)
        for layer in LAYERS:
            threading.Timer(0.02, host.let, [layer.layer_id]).start()
            watched.forward(nothing, nothing, nothing, layer, nothing)
            assert loading.flags.tolist()[: layer.layer_id + 1] == [1] * (layer.layer_id + 1)
    assert attention.seen == [[0], [0, 1], [0, 1, 2]]


def test_what_is_loaded_lies_where_it_should(host: SlowHost, pool: KVPool, loads: HostLoads) -> None:
    host.let(0, 1, 2)
    other = PageLoad(2, np.array([7]), np.array([3]))
    with loading_for([PAGES, other], loads, ahead=False):
        assert host.loaded == [0, 1, 2], "without a watch all of it is there before the batch"
    assert pool.keys(2)[[3, 4, 7], 0, 0].tolist() == [1.0, 2.0, 3.0]
    assert loads.stats()["loaded_bytes_total"] == 3 * 3 * 2 * 4 * 4


@pytest.mark.parametrize("ahead", [True, False])
def test_a_layer_that_is_lost_ends_the_batch_and_not_the_ones_before(
    host: SlowHost, loads: HostLoads, ahead: bool
) -> None:
    host.fails_at = 1
    host.let(0, 1, 2)
    with loading_for([PAGES], loads, ahead=ahead) as loading:
        loading.before(0)
        for layer_id in (1, 2):
            with pytest.raises(StepLost, match="not loaded") as raised:
                loading.before(layer_id)
            assert isinstance(raised.value.__cause__, OSError)
        with pytest.raises(StepLost):
            loading.before_all()
    with loading_for([PAGES], loads, ahead=ahead) as again:
        host.fails_at = None
        again.before(0)


def test_a_batch_that_raises_ends_when_nothing_is_written_any_more(host: SlowHost, loads: HostLoads) -> None:
    host.let(0)
    threading.Timer(0.05, host.let, [1, 2]).start()
    with pytest.raises(RuntimeError, match="out of luck"), loading_for([PAGES], loads, ahead=True):
        raise RuntimeError("out of luck")
    assert host.loaded == [0, 1, 2], "pages are given away while a load still writes to them"


def a_batch(attention: Recorder, mode: ForwardMode = ForwardMode.EXTEND) -> Any:
    return SimpleNamespace(forward_mode=mode, attn_backend=attention, watch=None)


@pytest.mark.parametrize("runner", [(), ("layer_watch", "own_attention"), ("own_attention",)])
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.SPLIT_PREFILL])
def test_who_waits_for_what_is_loaded(
    host: SlowHost, loads: HostLoads, runner: tuple[str, ...], mode: ForwardMode
) -> None:
    """The attention that the network calls, or the runner; or the pass does not begin before all is there."""
    part, attention = TierPart(frozenset(runner)), Recorder(host)
    part.source, batch = loads, a_batch(attention, mode)
    nothing: Any = None

    def run() -> str:
        watched = batch.attn_backend is not attention or batch.watch is not None
        assert watched == (mode is ForwardMode.EXTEND and runner != ("own_attention",))
        assert host.loaded == ([] if watched else [0, 1, 2])
        for layer in LAYERS if watched else ():
            host.let(layer.layer_id)
            if batch.watch is not None:
                batch.watch.before(layer.layer_id)
            else:
                batch.attn_backend.forward(nothing, nothing, nothing, layer, nothing)
        return "output"

    if mode is ForwardMode.SPLIT_PREFILL or runner == ("own_attention",):
        host.let(0, 1, 2)
    assert part.execute((PAGES,), batch, run) == "output"
    assert host.loaded == [0, 1, 2]


def test_a_layer_that_the_pass_does_not_ask_for_is_waited_for_all_the_same(host: SlowHost, loads: HostLoads) -> None:
    """What drafts reads layers of its own after the pass."""
    part = TierPart(frozenset())
    part.source, host.fails_at = loads, 2
    host.let(0, 1, 2)
    with pytest.raises(StepLost, match="not loaded"):
        part.execute((PAGES,), a_batch(Recorder(host)), lambda: None)


def test_without_a_host_pool_the_step_is_lost(host: SlowHost) -> None:
    with pytest.raises(StepLost, match="no host pool"):
        TierPart(frozenset()).execute((PAGES,), a_batch(Recorder(host)), lambda: None)
