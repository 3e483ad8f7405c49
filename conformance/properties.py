"""Settings for the property tests of suites. Importing it needs hypothesis (the extra `dev` has it)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from hypothesis import HealthCheck, Phase, settings

_NO_SHRINKING = (Phase.explicit, Phase.generate)
_shrinking = ContextVar("_shrinking", default=True)

# Where `@given` keeps a test's settings. There is no public way to run one test with others; without it, it is slower.
_SETTINGS = "_hypothesis_internal_use_settings"


def properties(max_examples: int = 60, stateful_step_count: int = 30) -> settings:
    """Return what `@given` tests and state machines of a suite run with: `@properties()` above `@given`, or
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
        phases=tuple(Phase) if _shrinking.get() else _NO_SHRINKING,
        suppress_health_check=[
            HealthCheck.differing_executors,
            HealthCheck.too_slow,
            HealthCheck.function_scoped_fixture,
        ],
    )


@contextlib.contextmanager
def without_shrinking(test: object) -> Iterator[None]:
    """While it lasts, a failure of this test is not made smaller: it fails many times faster."""
    own = getattr(test, _SETTINGS, None)
    token = _shrinking.set(False)
    try:
        if isinstance(own, settings):
            setattr(test, _SETTINGS, settings(own, phases=_NO_SHRINKING))
        yield
    finally:
        _shrinking.reset(token)
        if isinstance(own, settings):
            setattr(test, _SETTINGS, own)
