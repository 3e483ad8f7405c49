"""How conformance classes find their provider, are collected, skipped and expected to fail."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.conformance.fakes import EmptyCache, registry_of
from pegboard.conformance.subject import SuiteError, find_subject
from pegboard.conformance.suite import ContractSuite, check_suite, is_suite_class, subject_of
from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.interfaces.options import NoOptions, Options
from pegboard.core.interfaces.plugin import Provider
from pegboard.core.interfaces.schedule_policy import SchedulePolicy, SchedulePolicyContext

HEADER = "from sample import *\n"


class ArrivalOptions(Options):
    backwards: bool = False


class Arrival(SchedulePolicy):
    def order(self, waiting: Any, running: Any) -> Any:
        return list(waiting)


class Derived(Arrival):
    """A class that nobody registered, of one that somebody did."""


REGISTRY = registry_of(
    Provider(
        "schedule_policy",
        "arrival",
        f"{__name__}:Arrival",
        "",
        config=f"{__name__}:ArrivalOptions",
        provides=frozenset({"cache_aware"}),
    ),
    plugin="mine",
)


class PolicySuite(ContractSuite):
    contract = "schedule_policy"
    registry = REGISTRY

    def test_something(self) -> None:
        """Never run here: this module's classes have no name that pytest collects."""


def case(**attributes: Any) -> type[ContractSuite]:
    return type("Case", (PolicySuite,), attributes)


class TestFindingTheProvider:
    def test_by_name(self) -> None:
        subject = subject_of(case(provider="arrival"))
        assert subject.name == "arrival"
        assert subject.load() is Arrival
        assert subject.capabilities == {"cache_aware"}
        assert subject.options_model() is ArrivalOptions

    def test_a_class_that_nobody_registered_inherits_from_a_registered_one(self) -> None:
        subject = subject_of(case(factory=Derived))
        assert (subject.load(), subject.name) == (Derived, "Derived")
        assert subject.capabilities == {"cache_aware"}
        assert subject.options_model() is ArrivalOptions

    def test_a_class_can_say_for_itself(self) -> None:
        subject = subject_of(case(factory=Derived, provides=frozenset(), options_model=NoOptions))
        assert subject.capabilities == frozenset()
        assert subject.options_model() is NoOptions

    def test_a_class_of_nowhere_has_no_capability_and_no_option(self) -> None:
        class Alone(SchedulePolicy):
            def order(self, waiting: Any, running: Any) -> Any:
                return list(waiting)

        subject = subject_of(case(factory=Alone))
        assert (subject.record, subject.capabilities, subject.options_model()) == (None, frozenset(), NoOptions)

    def test_a_class_with_the_capabilities_of_a_named_provider(self) -> None:
        class Alone(SchedulePolicy):
            def order(self, waiting: Any, running: Any) -> Any:
                return list(waiting)

        assert subject_of(case(factory=Alone, provider="arrival")).capabilities == {"cache_aware"}

    def test_installed_plugins_are_the_default(self) -> None:
        subject = find_subject("schedule_policy", "fcfs")
        assert subject.record is not None
        assert subject.record.origin.distribution == "pegboard"

    @pytest.mark.parametrize(
        ("attributes", "message"),
        [
            ({}, 'provider = "<name>"'),
            ({"provider": "arival"}, "did you mean 'arrival'\\? installed: arrival \\(fake-distribution 0\\)"),
            ({"provider": "arrival", "provides": frozenset()}, "a provider's stand in its record"),
        ],
    )
    def test_errors(self, attributes: dict[str, Any], message: str) -> None:
        with pytest.raises(SuiteError, match=message):
            check_suite(case(**attributes))

    def test_unknown_contract(self) -> None:
        with pytest.raises(SuiteError, match="no contract 'prefix_cash'; did you mean 'prefix_cache'"):
            find_subject("prefix_cash", "radix")


class TestBuilding:
    context = SchedulePolicyContext(EmptyCache())

    def test_options_and_overrides(self) -> None:
        suite = case(provider="arrival", options={"backwards": False})()
        assert suite.build(self.context).options == ArrivalOptions()
        assert suite.build(self.context, backwards=True).options == ArrivalOptions(backwards=True)

    def test_options_that_the_model_refuses(self) -> None:
        suite = case(provider="arrival", options={"backward": True, "backwards": "perhaps"})()
        with pytest.raises(ConfigError) as error:
            suite.build(self.context)
        assert [problem.path for problem in error.value.problems] == ["options of arrival"] * 2
        assert "backward: Extra inputs are not permitted" in str(error.value)

    def test_an_objection_skips(self) -> None:
        class Picky(Arrival):
            @classmethod
            def supports(cls, options: Any, ctx: SchedulePolicyContext) -> str | None:
                return "not today"

        with pytest.raises(pytest.skip.Exception, match="Picky objects to this: not today"):
            case(factory=Picky)().build(self.context)


class TestTheSuiteStands:
    @pytest.mark.parametrize(("value", "what"), [(lambda self: None, "overridden"), (None, "deleted")])
    def test_a_changed_test_is_an_error(self, value: object, what: str) -> None:
        with pytest.raises(SuiteError, match=f"test_something is {what}"):
            check_suite(case(provider="arrival", test_something=value))

    def test_a_mixin_in_front_is_seen(self) -> None:
        class Mixin:
            def test_something(self) -> None: ...

        with pytest.raises(SuiteError, match="test_something is overridden"):
            check_suite(type("Case", (Mixin, PolicySuite), {"provider": "arrival"}))

    def test_another_suite_in_between_is_seen(self) -> None:
        between = type("Between", (PolicySuite,), {"contract": "schedule_policy", "test_something": lambda self: None})
        with pytest.raises(SuiteError, match="test_something is overridden"):
            check_suite(type("Case", (between,), {"provider": "arrival"}))

    def test_a_suite_that_lost_a_test_is_seen(self) -> None:
        suite = type("Suite", (PolicySuite,), {"contract": "schedule_policy", "test_more": lambda self: None})
        delattr(suite, "test_more")
        with pytest.raises(SuiteError, match="test_more is deleted"):
            check_suite(type("Case", (suite,), {"provider": "arrival"}))

    def test_more_tests_and_helpers_are_welcome(self) -> None:
        check_suite(case(provider="arrival", test_my_own=lambda self: None, build=lambda self, ctx: None))

    def test_suites_are_no_cases(self) -> None:
        assert is_suite_class(case())
        assert not is_suite_class(PolicySuite)
        assert not is_suite_class(ContractSuite)
        assert not is_suite_class(SchedulePolicy)


class TestCollecting:
    def test_two_lines_run_a_suite(self, sample: pytest.Pytester) -> None:
        sample.makepyfile(
            HEADER + "class TestArrival(SampleContract):\n    provider = 'arrival'\n    registry = REGISTRY\n"
        )
        result = sample.runpytest("-rs")
        result.assert_outcomes(passed=4, skipped=1)
        result.stdout.fnmatch_lines(["*arrival does not declare the capability schedule_policy.cache_aware"])

    def test_a_declared_capability_must_work(self, sample: pytest.Pytester) -> None:
        sample.makepyfile(
            HEADER + "class TestAware(SampleContract):\n    provider = 'aware'\n    registry = REGISTRY\n"
        )
        result = sample.runpytest("-rs")
        result.assert_outcomes(passed=4, skipped=1)
        result.stdout.fnmatch_lines(["*aware declares the capability schedule_policy.cache_aware"])

    def test_a_suite_itself_is_not_collected(self, sample: pytest.Pytester) -> None:
        sample.makepyfile(HEADER + "TestImported = SampleContract\n")
        assert sample.runpytest().ret == pytest.ExitCode.NO_TESTS_COLLECTED

    def test_fixtures_and_helpers_may_change(self, sample: pytest.Pytester) -> None:
        sample.makepyfile(
            HEADER
            + """
class TestArrival(SampleContract):
    provider = "arrival"
    registry = REGISTRY

    @pytest.fixture
    def waiting(self):
        return [make_req("b"), make_req("a")]

    def test_mine(self, waiting):
        assert waiting[0].rid == "b"
"""
        )
        sample.runpytest().assert_outcomes(passed=5, skipped=1)

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            (
                "def test_keeps_all(self): pass",
                "TestIt: the suite must stand as it is, but test_keeps_all is overridden*",
            ),
            ("test_counts = None", "TestIt: the suite must stand as it is, but test_counts is deleted*"),
            (
                "provider = 'arival'",
                "TestIt: no schedule_policy provider 'arival' is installed; did you mean 'arrival'*",
            ),
            ("provider = 'stranger'", "*'stranger' is a provider of sampler: use that contract's suite"),
            ("provider = 'future'", "*it implements schedule_policy 9.0, this Pegboard has 1.0*"),
            ("expected_failures = {'test_kept': 'x'}", "*names 'test_kept', which is not a test here; did you mean*"),
            ("expected_failures = {'test_counts': ''}", "*must say why 'test_counts' fails"),
            ("@capability('psychic')\n    def test_more(self): pass", "*'psychic', no capability of schedule_policy*"),
        ],
    )
    def test_collection_errors(self, sample: pytest.Pytester, body: str, message: str) -> None:
        sample.makepyfile(
            HEADER + f"class TestIt(SampleContract):\n    provider = 'arrival'\n    registry = REGISTRY\n    {body}\n"
        )
        result = sample.runpytest()
        result.assert_outcomes(errors=1)
        result.stdout.fnmatch_lines([message])
        result.stdout.no_fnmatch_line("*Traceback*")

    def test_one_broken_class_leaves_the_others(self, sample: pytest.Pytester) -> None:
        sample.makepyfile(
            test_bad=HEADER + "class TestBad(SampleContract):\n    provider = 'nobody'\n    registry = REGISTRY\n",
            test_good=HEADER + "class TestGood(SampleContract):\n    provider = 'arrival'\n    registry = REGISTRY\n",
        )
        sample.runpytest("--continue-on-collection-errors").assert_outcomes(passed=4, skipped=1, errors=1)


class TestExpectedFailures:
    BODY = (
        HEADER
        + "class TestIt(SampleContract):\n    provider = {!r}\n    registry = REGISTRY\n    expected_failures = {!r}\n"
    )

    def test_a_known_failure_is_no_failure(self, sample: pytest.Pytester) -> None:
        sample.makepyfile(self.BODY.format("forgetful", {"test_keeps_all": "one at a time", "test_counts[2]": "same"}))
        result = sample.runpytest("-rx")
        result.assert_outcomes(passed=2, skipped=1, xfailed=2)
        result.stdout.fnmatch_lines(["XFAIL *test_keeps_all - one at a time", "XFAIL *test_counts[[]2] - same"])

    def test_one_that_passes_after_all_is_a_failure(self, sample: pytest.Pytester) -> None:
        sample.makepyfile(self.BODY.format("arrival", {"test_keeps_all": "it used to fail"}))
        result = sample.runpytest()
        result.assert_outcomes(passed=3, skipped=1, failed=1)
        result.stdout.fnmatch_lines(["*XPASS(strict)*it used to fail*"])


def test_gpu_tests_are_skipped_without_a_device(sample: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pegboard.conformance.collecting._cuda_available", lambda: False)
    sample.makepyfile(
        HEADER
        + """
class GpuContract(ContractSuite):
    contract = "schedule_policy"
    registry = REGISTRY

    @pytest.mark.gpu
    def test_fast(self):
        raise AssertionError


class TestIt(GpuContract):
    provider = "arrival"
"""
    )
    result = sample.runpytest("-rs", "--strict-markers")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*needs a CUDA device"])
