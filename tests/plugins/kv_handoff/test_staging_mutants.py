"""Mistakes with blocks, and the tests that notice."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from pegboard.plugins.kv_handoff.api import staging_reader, staging_source
from pegboard.plugins.kv_handoff.api.blocks import Blocks
from pegboard.plugins.kv_handoff.api.leases import Lease, Leases
from pegboard.plugins.kv_handoff.api.protocol import Status
from pegboard.plugins.kv_handoff.api.staging_reader import StagedWire
from pegboard.plugins.kv_handoff.api.staging_source import Collector
from pegboard.plugins.kv_handoff.api.transfer import Ranges
from pegboard.plugins.kv_handoff.suite.rig import ranges
from tests.plugins.kv_handoff import peer, test_orders, test_staging, toy
from tests.plugins.kv_handoff.conftest import Make
from tests.plugins.kv_handoff.toy import SIZE


def collects_without_the_lease(collect):
    def broken(self, order, block):
        order.lease = Lease()
        return collect(self, order, block)

    return broken


def any_lease(get):
    return lambda self, word: Lease()


def believes_returns(answer):
    def broken(reader, number, status, block=0):
        answer(reader, number, Status.RETURNED if status is Status.RECALLED else status, block)

    return staticmethod(broken)


def recalls_at_once(init):
    return lambda self, *args: init(self, *args[:-1], 0.0)


def waits_for_no_answer(advance):
    return lambda self, stage: True if stage.returned else advance(self, stage)


def reads_the_first_block(make):
    def broken(region: int, offset: int, nbytes: int) -> Ranges:
        return ranges([(region, 0, nbytes)])

    return broken


def one_block_too_far(offset):
    return lambda self, number: offset(self, (number + 1) % self.count)


def keeps_blocks(give):
    return lambda self, number: None


def keeps_blocks_of_the_gone(leave):
    def broken(self, reader):
        reader.held = {}
        leave(self, reader)

    return broken


def checks_nothing(objection):
    return lambda some, sizes: ""


def gives_back_what_is_read(read):
    def broken(self, stage, block):
        here = stage.here
        read(self, stage, block)
        self._landing.blocks.give(here)

    return broken


def waits_for_all(free):
    return property(lambda self: self.count)


def any_number_at_once(most):
    return 1000


def listens_to_all(make_room):
    def broken(self, reader, number, nbytes):
        reader.held[-1] = 0, 0.0
        try:
            make_room(self, reader, number, nbytes)
        finally:
            del reader.held[-1]

    return broken


@dataclass(frozen=True)
class Mutant:
    """An attribute as it must not be, and the test that fails with it, with what it is parametrized by."""

    owner: object
    attribute: str
    breaks: Callable[..., object]
    caught_by: Callable[..., None]
    values: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        return self.breaks.__name__


MUTANTS = (
    Mutant(
        Collector,
        "_collect",
        collects_without_the_lease,
        test_staging.test_a_lease_that_ends_meanwhile,
    ),
    Mutant(Leases, "get", any_lease, test_staging.test_without_its_lease_nothing_is_collected),
    Mutant(Collector, "_answer", believes_returns, test_staging.test_a_block_that_is_recalled_while_it_is_read),
    Mutant(Collector, "__init__", recalls_at_once, test_staging.test_a_block_that_is_recalled_while_it_is_read),
    Mutant(StagedWire, "_advance", waits_for_no_answer, test_staging.test_a_block_that_is_recalled_while_it_is_read),
    Mutant(staging_reader, "_range", reads_the_first_block, test_staging.test_small_pieces_come_in_few_large_ones),
    Mutant(Blocks, "offset", one_block_too_far, test_staging.test_small_pieces_come_in_few_large_ones),
    Mutant(Blocks, "give", keeps_blocks, test_staging.test_small_pieces_come_in_few_large_ones),
    Mutant(Collector, "_leave", keeps_blocks_of_the_gone, test_staging.test_a_reader_that_leaves_gives_its_blocks_back),
    Mutant(
        staging_source,
        "objection",
        checks_nothing,
        test_orders.test_pieces_beyond_the_regions_are_refused,
        (("piece", (0, SIZE - 63, 64)),),
    ),
    Mutant(StagedWire, "_read", gives_back_what_is_read, test_staging.test_abandoned_reads_give_their_blocks_back),
    Mutant(Blocks, "free", waits_for_all, test_staging.test_a_source_that_never_ends_a_read_stops_no_other_one),
    Mutant(
        staging_source,
        "AT_ONCE",
        any_number_at_once,
        test_orders.test_what_must_not_come_closes_the_connection,
        (("data", test_orders.TOO_MANY),),
    ),
    Mutant(Collector, "_make_room", listens_to_all, test_orders.test_orders_that_wait_are_bounded),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    for module in (toy, peer):
        monkeypatch.setattr(module, "PATIENCE", 1.0)
    original = inspect.getattr_static(mutant.owner, mutant.attribute)
    original = original.__func__ if isinstance(original, staticmethod) else original
    monkeypatch.setattr(mutant.owner, mutant.attribute, mutant.breaks(original))
    wanted = [name for name in inspect.signature(mutant.caught_by).parameters if name not in dict(mutant.values)]
    fixtures = {name: request.getfixturevalue(name) for name in wanted}
    with pytest.raises((AssertionError, TimeoutError)):
        mutant.caught_by(**fixtures, **dict(mutant.values))
