"""The mutants' helper: it must not be fooled."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st

from pegboard.conformance.fakes import EmptyCache, make_req
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.conformance.properties import properties, without_shrinking
from pegboard.conformance.suite import ContractSuite, capability
from pegboard.core.interfaces.schedule_policy import SchedulePolicy, SchedulePolicyContext


class PolicySuite(ContractSuite):
    contract = "schedule_policy"

    def policy(self) -> Any:
        return self.build(SchedulePolicyContext(EmptyCache()))

    @pytest.fixture
    def victims(self) -> list[Any]:
        return list(self.policy().victims([make_req(output=[1])]))

    def test_keeps_all(self) -> None:
        assert len(self.policy().order([make_req("a"), make_req("b")], [])) == 2

    def test_victims(self, victims: list[Any]) -> None:
        assert len(victims) == 1

    @capability("cache_aware")
    def test_reads(self) -> None:
        raise AssertionError

    @properties(max_examples=10)
    @given(count=st.integers(0, 5))
    def test_any_number(self, count: int) -> None:
        assert len(self.policy().order([make_req(str(index)) for index in range(count)], [])) == count


class Fine(SchedulePolicy):
    def order(self, waiting: Any, running: Any) -> Any:
        return list(waiting)


class Forgetful(Fine):
    def order(self, waiting: Any, running: Any) -> Any:
        return list(waiting)[:1]


class Raising(Fine):
    def victims(self, running: Any) -> Any:
        raise ValueError("in a fixture")


class Harmless(Fine):
    pass


@pytest.mark.parametrize("test", ["test_keeps_all", "test_any_number"])
def test_a_caught_mutant_passes(test: str) -> None:
    assert_caught(Mutant(Forgetful, PolicySuite, test))


def test_the_outer_options_stay_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")
    assert_caught(Mutant(Forgetful, PolicySuite, "test_keeps_all"))
    assert os.environ["PYTEST_ADDOPTS"] == "--no-such-option"


@pytest.mark.parametrize(
    ("mutant", "message"),
    [
        (Mutant(Harmless, PolicySuite, "test_keeps_all"), "test_keeps_all does not catch Harmless"),
        (Mutant(Harmless, PolicySuite, "test_keeps_all", base=Forgetful), "fails on the original, Forgetful"),
        (Mutant(Forgetful, PolicySuite, "test_reads"), "does not run on the original, Fine"),
        (Mutant(Forgetful, PolicySuite, "test_keeps_al"), "has no test 'test_keeps_al'; did you mean 'test_keeps_all'"),
        (Mutant(Raising, PolicySuite, "test_victims"), "cannot run on Raising"),
    ],
    ids=str,
)
def test_what_is_not_a_catch(mutant: Mutant, message: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=message):
        assert_caught(mutant)


def test_it_is_called_after_its_class() -> None:
    assert str(Mutant(Forgetful, PolicySuite, "test_keeps_all")) == "Forgetful"


def test_hypothesis_keeps_its_settings() -> None:
    """Mutants are not shrunk; whoever runs the suite afterwards gets the small counterexample all the same."""
    test = PolicySuite._suite_tests["test_any_number"]
    before = test._hypothesis_internal_use_settings  # type: ignore[attr-defined]
    with without_shrinking(test):
        assert Phase.shrink not in test._hypothesis_internal_use_settings.phases  # type: ignore[attr-defined]
        assert Phase.shrink not in properties().phases
    assert test._hypothesis_internal_use_settings is before  # type: ignore[attr-defined]
    assert Phase.shrink in before.phases
    assert Phase.shrink in properties().phases
