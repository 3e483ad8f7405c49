"""A suite must be able to fail: deliberately broken providers, each caught by the test that is meant for it.

::

    class ForgetsToLock(MyCache):
        def lock(self, handle): ...

    MUTANTS = [Mutant(ForgetsToLock, suite=PrefixCacheContract, caught_by="test_lock_keeps")]

    @pytest.mark.parametrize("mutant", MUTANTS, ids=str)
    def test_caught(mutant):
        assert_caught(mutant)
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from pegboard.conformance.collecting import InMemory
from pegboard.conformance.outcomes import Outcomes
from pegboard.conformance.properties import without_shrinking
from pegboard.conformance.suite import ContractSuite
from pegboard.toolkit.text.near_names import did_you_mean

# Plugins that watch the whole process: the outer run has its own.
_QUIET = (
    *("-q", "--capture=no", "--tb=short", "-p", "no:faulthandler", "-p", "no:threadexception"),
    *("-p", "no:unraisableexception", "-p", "no:timeout"),
)

_PASSED: set[tuple[object, ...]] = set()
"""Originals that passed, each with the test and what it was built with. Suites are deterministic."""


@dataclass(frozen=True)
class Mutant:
    """A broken class and the test of the suite that has to notice, with words that its failure `says`.

    `base` is the same without the bug, by default the class that it derives from; `options` build both. Capabilities
    and options model are those of the registered class that it derives from, or `provides` and `options_model`. `says`
    is what the failure's message must hold, so that an author learns what is wrong.
    """

    factory: type[Any]
    suite: type[ContractSuite]
    caught_by: str
    options: Mapping[str, Any] = field(default_factory=dict)
    base: type[Any] | None = None
    provides: frozenset[str] | None = None
    options_model: type[Any] | None = None
    says: str = ""

    def __str__(self) -> str:
        return self.factory.__name__

    @property
    def original(self) -> type[Any]:
        return self.base if self.base is not None else self.factory.__mro__[1]


def assert_caught(mutant: Mutant) -> None:
    """Fail unless the mutant's test passes on the original and fails on the mutant.

    Both run in this process, in a pytest of their own; an original that has passed a test is not asked again for the
    next mutant. An error outside the test (in a fixture, say) catches nothing.
    """
    if mutant.caught_by not in mutant.suite._suite_tests:
        hint = did_you_mean(mutant.caught_by, mutant.suite._suite_tests)
        pytest.fail(f"{mutant.suite.__name__} has no test {mutant.caught_by!r}; {hint}", pytrace=False)
    name = f"{mutant.suite.__name__}.{mutant.caught_by}"
    _check_original(mutant, name)
    broken, text = _run(mutant, mutant.factory)
    if broken.errors:
        pytest.fail(f"{name} cannot run on {mutant}:\n{text}", pytrace=False)
    if not broken.failed:
        pytest.fail(f"{name} does not catch {mutant}:\n{text}", pytrace=False)
    if mutant.says not in " ".join(text.split()):
        pytest.fail(f"{name} catches {mutant}, but does not say {mutant.says!r}:\n{text}", pytrace=False)


def _check_original(mutant: Mutant, name: str) -> None:
    options = repr(sorted(mutant.options.items()))
    key = (mutant.original, mutant.suite, mutant.caught_by, mutant.provides, mutant.options_model, options)
    if key in _PASSED:
        return
    original, text = _run(mutant, mutant.original)
    if original.failed or original.errors or not original.passed:
        what = "fails on" if original.failed or original.errors else "does not run on"
        pytest.fail(f"{name} {what} the original, {mutant.original.__name__}:\n{text}", pytrace=False)
    _PASSED.add(key)


def _run(mutant: Mutant, factory: type[Any]) -> tuple[Outcomes, str]:
    attributes: dict[str, Any] = {"factory": factory, "options": mutant.options, "__module__": __name__}
    if mutant.provides is not None:
        attributes["provides"] = mutant.provides
    if mutant.options_model is not None:
        attributes["options_model"] = mutant.options_model
    classes = {factory.__name__: type(mutant.suite.__name__, (mutant.suite,), attributes)}
    outcomes, output = Outcomes(), io.StringIO()
    test = mutant.suite._suite_tests[mutant.caught_by]
    with contextlib.redirect_stdout(output), _without_addopts(), without_shrinking(test):
        runner = InMemory(mutant.suite.contract, lambda: classes, only=mutant.caught_by)
        runner.run(*_QUIET, plugins=[outcomes])
    return outcomes, output.getvalue()


@contextlib.contextmanager
def _without_addopts() -> Iterator[None]:
    """Options meant for the outer run stay out of the inner one."""
    kept = os.environ.pop("PYTEST_ADDOPTS", None)
    try:
        yield
    finally:
        if kept is not None:
            os.environ["PYTEST_ADDOPTS"] = kept
