"""A small suite of the contract `schedule_policy`, and policies to run it against."""

from __future__ import annotations

from pathlib import Path

import pytest

# pytester forgets modules that a nested run imported first; what the kit consists of must stay.

SAMPLE = '''
import pytest

from pegboard.core.interfaces.options import Options
from pegboard.core.interfaces.plugin import Provider
from pegboard.core.interfaces.schedule_policy import SchedulePolicy, SchedulePolicyContext
from pegboard.conformance.fakes import make_req, registry_of
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.conformance.suite import ContractSuite, capability, lacks


class SampleContract(ContractSuite):
    contract = "schedule_policy"

    @pytest.fixture
    def waiting(self):
        return [make_req("a"), make_req("b")]

    def helper(self):
        return "the suite's"

    def test_keeps_all(self, waiting):
        assert sorted(req.rid for req in self.build(SchedulePolicyContext(None)).order(waiting, [])) == ["a", "b"]

    @pytest.mark.parametrize("count", [0, 2])
    def test_counts(self, count):
        waiting = [make_req(str(index)) for index in range(count)]
        assert len(self.build(SchedulePolicyContext(None)).order(waiting, [])) == count

    @capability("cache_aware")
    def test_reads_the_cache(self):
        assert "cache_aware" in self.capabilities

    @lacks("cache_aware")
    def test_leaves_the_cache_alone(self):
        assert "cache_aware" not in self.capabilities


class ArrivalOptions(Options):
    backwards: bool = False


class Arrival(SchedulePolicy):
    """Correct, with an option."""

    def order(self, waiting, running):
        return list(reversed(waiting)) if getattr(self.options, "backwards", False) else list(waiting)


class Forgetful(Arrival):
    def order(self, waiting, running):
        return super().order(waiting, running)[:1]


class Picky(Arrival):
    @classmethod
    def supports(cls, options, ctx):
        return "the moon is not full"


def provider(name, cls, **fields):
    return Provider("schedule_policy", name, f"sample:{cls}", name, **fields)


REGISTRY = registry_of(
    provider("arrival", "Arrival", config="sample:ArrivalOptions"),
    provider("aware", "Arrival", provides=frozenset({"cache_aware"})),
    provider("forgetful", "Forgetful"),
    provider("picky", "Picky"),
    provider("future", "Arrival", contract_version="9.0"),
    Provider("sampler", "stranger", "sample:Arrival", "of another contract"),
    plugin="sample",
    distribution="sample-distribution",
    version="1.2",
)
'''


@pytest.fixture
def sample(pytester: pytest.Pytester) -> pytest.Pytester:
    """A pytester whose folder has the module `sample`."""
    pytester.makepyfile(sample=SAMPLE)
    pytester.syspathinsert()
    return pytester


@pytest.fixture
def report_file(tmp_path: Path) -> Path:
    return tmp_path / "reports" / "conformance.json"
