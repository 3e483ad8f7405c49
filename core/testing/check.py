"""``pegboard plugins check``: a provider against its contract's suite, with no test file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pegboard.core.interfaces.contracts import CONTRACTS
from pegboard.core.interfaces.errors import PluginError
from pegboard.core.lazy import import_name
from pegboard.core.names import did_you_mean


def run(contract: str, provider: str, *, report: Path | None = None, extra_args: Iterable[str] = ()) -> int:
    """Run the contract's conformance suite on an installed provider; the output is pytest's.

    `report` receives the conformance report as JSON; `extra_args` go to pytest. Writes nothing else.
    Returns 0 where the provider conforms, and otherwise pytest's exit code, or 1 where no test passed: a provider that
    objects to everything (for want of a device, say) has not been checked.
    Raises PluginError where there is nothing to check: no such contract, suite or provider, or no pytest.
    """
    found = CONTRACTS.get(contract)
    if found is None:
        hint = did_you_mean(contract, CONTRACTS) or f"contracts: {', '.join(CONTRACTS)}"
        raise PluginError(f"there is no contract {contract!r}; {hint}")
    if not found.suite:
        raise PluginError(f"{contract} has no conformance suite yet")
    missing = [name for name in ("pytest", "hypothesis") if find_spec(name) is None]
    if missing:
        raise PluginError(f"checking a plugin needs pytest and hypothesis: pip install {' '.join(missing)}")
    from pegboard.core.testing.collecting import InMemory
    from pegboard.core.testing.outcomes import Outcomes
    from pegboard.core.testing.subject import SuiteError, find_subject

    try:
        find_subject(contract, provider)
    except SuiteError as error:
        raise PluginError(str(error)) from error

    def classes() -> dict[str, type[Any]]:
        suite = import_name(found.suite)
        return {provider: type(suite.__name__, (suite,), {"provider": provider, "__module__": __name__})}

    args = ["-rfEs", *([f"--conformance-report={report.absolute()}"] if report else []), *extra_args]
    # hypothesis would keep what it learns of the constants in the code below the working directory.
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(Path(tempfile.gettempdir(), "pegboard-hypothesis")))
    outcomes = Outcomes()
    code = InMemory(contract, classes).run(*args, plugins=[outcomes])
    if code == 0 and not outcomes.passed:
        print(f"{provider}: no test passed, so nothing was checked")  # noqa: T201
        return 1
    return code
