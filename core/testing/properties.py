"""Settings for the property tests of suites. Importing it needs hypothesis (the extra `dev` has it)."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def properties(max_examples: int = 60, stateful_step_count: int = 30) -> settings:
    """What `@given` tests and state machines of a suite run with: `@properties()` above `@given`, or
    ``run_state_machine_as_test(machine, settings=properties())``.

    The same examples for everybody, so that a plugin that passes here passes there; no deadline, because machines
    differ; nothing written to disk. One inherited test runs for several providers, which `differing_executors` mistakes
    for an error.
    """
    return settings(
        max_examples=max_examples,
        stateful_step_count=stateful_step_count,
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=[
            HealthCheck.differing_executors,
            HealthCheck.too_slow,
            HealthCheck.function_scoped_fixture,
        ],
    )
