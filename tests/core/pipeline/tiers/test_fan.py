from __future__ import annotations

import numpy as np
import pytest

from pegboard.core.pipeline.tiers.fan import FanMover
from tests.core.pipeline.tiers.tier_rig import Rig, blocks, names, until


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch):
    made = [Rig(monkeypatch, suffix=b".%d" % rank) for rank in range(2)]
    yield made
    for rig in made:
        rig.host.gate.set()
        rig.close()


def test_what_one_rank_lacks_all_lack(ranks: list[Rig]) -> None:
    fan = FanMover([rig.mover for rig in ranks])
    assert (fan.host_pages, fan.block_pages, fan.stores) == (400, 2, ("store0",))
    store = fan.store(0, names(5), blocks(5))
    assert fan.wait([store], 10)
    assert (store.result, store.error) == (5, "")
    ranks[1].storages[0].place.lose([names(1, first=3)[0] + b".1"])
    find, fetch = fan.find(names(5)), fan.fetch(names(5), blocks(5))
    assert fan.wait([find, fetch], 10)
    assert (find.result, fetch.result, fetch.error) == (3, 3, "")
    ranks[0].storages[0].faults.fail()
    broken = fan.fetch(names(5), blocks(5))
    assert fan.wait([broken], 10)
    assert broken.result == 0
    assert "broken on demand" in broken.error


def test_a_job_is_over_when_it_is_over_everywhere(ranks: list[Rig]) -> None:
    fan = FanMover([rig.mover for rig in ranks])
    ranks[1].host.gate.clear()
    first = fan.save(np.arange(1, 8), np.arange(1, 8))
    second = fan.save(np.arange(1, 8), np.arange(1, 8))
    assert ranks[0].mover.wait([first.jobs[0], second.jobs[0]], 10)
    until(lambda: ranks[1].host.saves)
    assert not fan.wait([first], 0.05)
    assert not first.done
    fan.cancel(first)
    fan.cancel(second)
    assert (first.done, second.done, second.result) == (False, True, 0)
    ranks[1].host.gate.set()
    assert fan.wait([first, second], 10)
    assert first.result == 3  # where the other rank was when it was stopped


def test_ranks_are_alike(ranks: list[Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    other = Rig(monkeypatch, 2)
    with pytest.raises(ValueError, match="same blocks and storages"):
        FanMover([ranks[0].mover, other.mover])
    with pytest.raises(ValueError, match="got none"):
        FanMover([])
    other.close()
