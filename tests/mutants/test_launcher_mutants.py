"""Broken launchers of ranks, and the tests of the suite that notice."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.plugins.parallel.processes import Processes
from pegboard.plugins.parallel.suite import launcher as suite
from pegboard.plugins.parallel.suite.launcher import RankLauncherContract
from tests.parallel.actors_here import ActorsHere


class CutsLongLines(Processes):
    def start(self, line):
        return super().start(lambda file: line(file)[:100_000] + b"\n")


class GivesAllCoresToEach(Processes):
    def __init__(self, options, ctx):
        super().__init__(options, replace(ctx, size=1))


class ClosesItsInput(Processes):
    def start(self, line):
        handle = super().start(line)
        vars(handle)["process"].stdin.close()
        return handle


class Handle:
    """A rank's handle, of which a mutant says something else."""

    def __init__(self, handle):
        self.handle = handle

    def __getattr__(self, name):
        return getattr(self.handle, name)


class WithoutSignals(Handle):
    def died(self, seconds):
        return (self.handle.died(seconds) or "").replace("was ended by signal ", "exited with code -") or None


class Once(Handle):
    told: str | None = None

    def died(self, seconds):
        if self.told is None:
            self.told = self.handle.died(seconds)
            return self.told
        return None


class KilledOnce(Handle):
    killed = False

    def kill(self):
        assert not self.killed
        self.killed = True
        self.handle.kill()


class KnowsNoSignals(Processes):
    def start(self, line):
        return WithoutSignals(super().start(line))


class TellsItOnce(Processes):
    def start(self, line):
        return Once(super().start(line))


class KillsOnce(Processes):
    def start(self, line):
        return KilledOnce(super().start(line))


class AcceptsAnyone(ActorsHere):
    """Takes whoever comes for the rank."""

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = self._door.getsockname()

    def start(self, line):
        handle = super().start(line)
        handle.connection.close()
        handle.connection = self._door.accept()[0]
        return handle

    def close(self):
        self._door.close()
        super().close()


class KeepsStrangers(ActorsHere):
    """Has a port at which it does not look."""

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = self._door.getsockname()

    def close(self):
        self._door.close()
        super().close()


class SaysNoAddress(ActorsHere):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.address = None


class Listens(Processes):
    address = ("127.0.0.1", 1)


CAUGHT = {
    CutsLongLines: "test_a_rank_gets_its_line_and_its_socket",
    GivesAllCoresToEach: "test_a_rank_gets_its_line_and_its_socket",
    ClosesItsInput: "test_it_runs_until_it_ends",
    KnowsNoSignals: "test_how_it_ends_is_told",
    TellsItOnce: "test_how_it_ends_is_told",
    KillsOnce: "test_kill_ends_it_and_may_be_called_again",
    Listens: "test_it_does_not_listen",
}
MACHINES = {
    AcceptsAnyone: "test_strangers_are_cut_off",
    KeepsStrangers: "test_strangers_are_cut_off",
    SaysNoAddress: "test_ranks_connect_by_tcp",
}
PROVIDES = frozenset({"machines"})
MUTANTS = [Mutant(cls, suite=RankLauncherContract, caught_by=test) for cls, test in CAUGHT.items()]
MUTANTS += [
    Mutant(cls, suite=RankLauncherContract, caught_by=test, provides=PROVIDES) for cls, test in MACHINES.items()
]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants keep strangers for good; others end them at once."""
    monkeypatch.setattr(suite, "CUT_OFF_SECONDS", 2.0)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
