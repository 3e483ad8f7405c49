"""Where batches run: adapters are read in a thread, and put into slots when batches need them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pegboard.core.interfaces.ahead import LoadedModel
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.adapters.api import AdapterContext, AdapterWeights
from pegboard.plugins.adapters.messages import BatchSlots, Drop, Load, Loaded, Poll
from pegboard.plugins.adapters.options import AdapterSection
from pegboard.plugins.adapters.part import AdapterPart
from pegboard.plugins.lora_torch.backend import TorchAdapters
from pegboard.toolkit.model.linear import NetworkSites
from tests.plugins.adapters.peft_files import write_files
from tests.plugins.adapters.test_refusals import CONFIG, SITES, TENSORS


class Backend(TorchAdapters):
    """Notes what is activated and cleared. `prepare` waits while `held` is set."""

    def __init__(self, ctx: AdapterContext) -> None:
        super().__init__(NoOptions(), ctx)
        self.calls: list[tuple[str, int]] = []
        self.go = threading.Event()
        self.go.set()

    def prepare(self, weights: AdapterWeights) -> dict[int, Any]:
        assert self.go.wait(60)
        return super().prepare(weights)

    def activate(self, slot: int, prepared: object) -> None:
        self.calls.append(("activate", slot))
        super().activate(slot, prepared)

    def clear(self, slot: int) -> None:
        self.calls.append(("clear", slot))
        super().clear(slot)


class Rig:
    """A part with a backend that is watched."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        write_files(directory / "a", CONFIG, TENSORS)
        sites = NetworkSites()
        sites.all = SITES
        section = AdapterSection(preload={"a": str(directory / "a")}, directories=(str(directory),))
        self.part = AdapterPart(section, sites, torch.float32, self._make)
        model = LoadedModel(lambda: None, lambda: None, None, torch.device("cpu"), None)  # type: ignore[arg-type,return-value]
        self.part.attach(model)

    def _make(self, ctx: AdapterContext) -> Backend:
        self.backend = Backend(ctx)
        return self.backend

    def run(self, work: object) -> object:
        return self.part.run(work, None)  # type: ignore[arg-type]

    def polled(self, count: int) -> list[Loaded]:
        """Return this many loads once they have ended."""
        found: list[Loaded] = []
        end = time.monotonic() + 60
        while len(found) < count and time.monotonic() < end:
            answer = self.run(Poll())
            assert isinstance(answer, list)
            found += answer
            time.sleep(0.001)
        return found

    def batch(self, uids: dict[int, int]) -> None:
        class Batch:
            additions: object = None

        slots = np.array(list(uids), np.int64)
        payload, batch = BatchSlots(slots, np.ones_like(slots), uids), Batch()
        self.part.unpack(payload, batch, torch.from_numpy)  # type: ignore[arg-type]
        assert batch.additions is not None


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_what_is_configured_is_there(rig: Rig) -> None:
    [loaded] = rig.polled(1)
    assert (loaded.uid, loaded.error, loaded.rank) == (1, "", 2)
    rig.batch({1: 1})
    assert rig.backend.calls == [("activate", 1)]


def test_slots_are_filled_when_they_change(rig: Rig) -> None:
    rig.run(Load(2, str(rig.directory / "a")))
    assert [one.uid for one in rig.polled(2)] == [1, 2]
    for uids in ({1: 1}, {1: 1, 2: 2}, {2: 2}, {1: 2}, {1: 2, 2: 2}, {1: 1}):
        rig.batch(uids)
    assert rig.backend.calls == [("activate", slot) for slot in (1, 2, 1, 1)]


def test_dropping(rig: Rig) -> None:
    rig.run(Load(2, str(rig.directory / "a")))
    rig.polled(2)
    rig.batch({1: 1, 2: 2})
    rig.run(Drop((1,)))
    assert rig.backend.calls[2:] == [("clear", 1)]
    rig.batch({2: 2})
    with pytest.raises(KeyError):
        rig.batch({1: 1})


def test_loads_take_their_turn_in_one_thread(rig: Rig) -> None:
    """Batches run meanwhile, and the thread ends with the last load."""
    rig.polled(1)
    rig.backend.go.clear()
    for uid in range(2, 7):
        rig.run(Load(uid, str(rig.directory / ("a" if uid % 2 else "none"))))
    threads = [one for one in threading.enumerate() if one.name == "adapters"]
    assert len(threads) <= 1
    rig.batch({1: 1})
    rig.backend.go.set()
    loads = rig.polled(5)
    assert [(one.uid, bool(one.error)) for one in loads] == [(uid, uid % 2 == 0) for uid in range(2, 7)]
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_where_adapters_may_be(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    write_files(other / "b", CONFIG, TENSORS)
    (rig.directory / "link").symlink_to(other / "b")
    (rig.directory / "inside").symlink_to(rig.directory / "a")
    paths = ["link", "inside", "../" + rig.directory.name + "/a", "a/../a", "nothing"]
    for uid, path in enumerate([str(rig.directory / path) for path in paths] + [str(other / "b")], start=2):
        rig.run(Load(uid, path))
    errors = [one.error for one in rig.polled(7)[1:]]
    assert ["not below" in error for error in errors] == [True, False, False, False, False, True]
    assert [bool(error) for error in errors] == [True, False, False, False, True, True]
