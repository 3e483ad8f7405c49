"""Any calls in any order against a dictionary: every page that is found or loaded holds what it should."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis.stateful import run_state_machine_as_test

from pegboard.conformance.properties import properties
from tests.plugins.cache_hiradix.machine import TierMachine

SETUPS: dict[str, dict[str, Any]] = {
    "room for all": {},
    "pages of 4": {"page_size": 4, "options": {"load_threshold": 5, "save_batch": 8}},
    "pages of 16": {"page_size": 16, "options": {"eviction": "lfu"}},
    "tight": {"num_pages": 12, "host_pages": 14, "finds": "at most", "options": {"save_batch": 2}},
    "tight slru": {
        "host_pages": 20, "page_size": 4, "finds": "at most",
        "options": {"eviction": "slru", "protected_share": 0.3},
    },
    "selective": {"options": {"write_policy": "write_through_selective", "eviction": "fifo"}},
    "write back": {
        "host_pages": 20, "finds": "at most",
        "options": {"write_policy": "write_back", "clean_share": 0.4, "sync_tokens": 4},
    },
    "storages": {
        "stores": ("near", "far"), "host_pages": 60, "num_pages": 24, "finds": "anything",
        "options": {"store_share": 0.5},
    },
    "storages, tight": {
        "stores": ("one",), "host_pages": 24, "page_size": 4, "finds": "anything",
        "options": {"hits_to_store": 2, "write_policy": "write_through_selective", "prefetch_share": 0.6},
    },
    "storages, write back": {
        "stores": ("one",), "host_pages": 16, "block_pages": 1, "finds": "anything",
        "options": {"write_policy": "write_back", "clean_share": 0.5},
    },
    "write back priority": {
        "host_pages": 12, "page_size": 4, "finds": "at most",
        "options": {"write_policy": "write_back", "eviction": "priority", "sync_tokens": 64},
    },
}  # fmt: skip


def run(name: str, examples: int, steps: int) -> type[TierMachine]:
    machine = type(name, (TierMachine,), {**SETUPS[name]})
    run_state_machine_as_test(machine, settings=properties(examples, steps))
    return machine


@pytest.mark.parametrize("name", SETUPS)
def test_some(name: str) -> None:
    assert run(name, 5, 25).steps > 50


@pytest.mark.full
@pytest.mark.parametrize("name", SETUPS)
def test_twenty_thousand(name: str) -> None:
    """In all: of each setup its share. What it is there for happens. Examples depend on the process, so what is rare is
    left to directed tests.
    """
    machine = run(name, 120, 50)
    assert machine.steps >= 20_000 // len(SETUPS)
    happens = {"hit_host", "saved", "torn"}
    if name == "room for all":
        happens |= {"loads_failed"}
    if name.startswith("tight"):
        happens |= {"host_evicted"}
    if name == "storages":
        happens |= {"fetched", "stored"}
    missing = {what for what in happens if not machine.totals.get(f"{what}_tokens_total")}
    assert not missing, f"no tokens were {sorted(missing)}"
