"""Broken launchers of ranks, and the tests of the suite that notice."""

from __future__ import annotations

import pytest

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.plugins.parallel.processes import Processes
from pegboard.plugins.parallel.suite.launcher import RankLauncherContract


class CutsLongLines(Processes):
    def start(self, line, link):
        return super().start(line[:100_000] + b"\n", link)


class GivesAllCoresToEach(Processes):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self._threads = ctx.cores


class ClosesItsInput(Processes):
    def start(self, line, link):
        handle = super().start(line, link)
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
    def start(self, line, link):
        return WithoutSignals(super().start(line, link))


class TellsItOnce(Processes):
    def start(self, line, link):
        return Once(super().start(line, link))


class KillsOnce(Processes):
    def start(self, line, link):
        return KilledOnce(super().start(line, link))


CAUGHT = {
    CutsLongLines: "test_a_rank_gets_its_line_and_its_socket",
    GivesAllCoresToEach: "test_a_rank_gets_its_line_and_its_socket",
    ClosesItsInput: "test_it_runs_until_it_ends",
    KnowsNoSignals: "test_how_it_ends_is_told",
    TellsItOnce: "test_how_it_ends_is_told",
    KillsOnce: "test_kill_ends_it_and_may_be_called_again",
}
MUTANTS = [Mutant(cls, suite=RankLauncherContract, caught_by=test) for cls, test in CAUGHT.items()]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
