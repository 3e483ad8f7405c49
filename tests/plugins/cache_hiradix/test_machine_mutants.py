"""What the state machine must notice, with the cache's own self-check switched off."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from pegboard.conformance.properties import properties
from pegboard.plugins.cache_hiradix.cache import HiRadixCache
from tests.mutants import tier_caches as broken
from tests.plugins.cache_hiradix.machine import TierMachine
from tests.plugins.cache_hiradix.test_machine import SETUPS

CAUGHT: dict[type[HiRadixCache], str] = {
    broken.UnpinsAtLaunch: "tight",
    broken.NoEpoch: "room for all",
    broken.FindsWhatIsOnItsWay: "room for all",
    broken.BelievesCopies: "room for all",
    broken.LoadsInTheWrongOrder: "room for all",
    broken.EvictionWaits: "room for all",
    broken.LocksNoTails: "tight",
    broken.UnlocksAllTails: "tight",
    broken.GivesPagesOfRunningJobs: "tight",
    broken.ResetKeepsTheHost: "room for all",
    broken.EndsNoLoads: "tight",
    broken.BelievesBlocks: "storages",
    broken.StoresWithoutNamespaces: "storages",
}


@pytest.mark.parametrize("cache", CAUGHT, ids=lambda cls: cls.__name__)
def test_caught(cache: type[HiRadixCache]) -> None:
    machine = type("Machine", (TierMachine,), {**SETUPS[CAUGHT[cache]], "cache": cache})
    unshrunk = settings(properties(400, 50), phases=[Phase.generate])
    with pytest.raises((Exception, pytest.fail.Exception)):
        run_state_machine_as_test(machine, settings=unshrunk)


def test_nothing_else_is_caught() -> None:
    """The same without a bug passes."""
    machine = type("Machine", (TierMachine,), {"cache": broken.Tiers})
    run_state_machine_as_test(machine, settings=properties(5, 30))
