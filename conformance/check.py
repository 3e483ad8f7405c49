"""``pegboard plugins check``: a provider against its contract's suite, with no test file."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegboard.core.interfaces.errors import PluginError
from pegboard.core.registry.registry import Registry
from pegboard.toolkit.system.lazy_names import import_name
from pegboard.toolkit.text.near_names import did_you_mean

if TYPE_CHECKING:
    from pegboard.core.registry.records import ProviderRecord

HARDLY_TESTED = 8
"""Exit code where nothing failed and next to nothing ran. Pytest's own are 0 to 5."""


def run(contract: str, provider: str, *, report: Path | None = None, extra_args: Iterable[str] = ()) -> int:
    """Run the conformance tests of an installed provider; the output is pytest's.

    These are the classes that its record names in `conformance`, or the contract's suite as it is. `report` receives
    the conformance report as JSON; `extra_args` go to pytest. Writes nothing else.
    Returns 0 where the provider conforms, and otherwise pytest's exit code; 1 where no test passed (a provider that
    objects to everything, for want of a device, say, has not been checked); HARDLY_TESTED where most were skipped.
    Raises PluginError where there is nothing to check: no such contract, suite or provider, or no pytest.
    """
    contracts = Registry.discover().contracts
    found = contracts.get(contract)
    if found is None:
        hint = did_you_mean(contract, contracts) or f"contracts: {', '.join(contracts)}"
        raise PluginError(f"there is no contract {contract!r}; {hint}")
    if not found.suite:
        raise PluginError(f"{contract} has no conformance suite yet")
    missing = [name for name in ("pytest", "hypothesis") if find_spec(name) is None]
    if missing:
        raise PluginError(f"checking a plugin needs pytest and hypothesis: pip install {' '.join(missing)}")
    from pegboard.conformance.collecting import InMemory
    from pegboard.conformance.subject import SuiteError, find_subject

    try:
        record = find_subject(contract, provider).record
    except SuiteError as error:
        raise PluginError(str(error)) from error
    assert record is not None
    # hypothesis would keep what it learns of the constants in the code below the working directory.
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(Path(tempfile.gettempdir(), "pegboard-hypothesis")))
    with tempfile.TemporaryDirectory() as folder:
        path = (report or Path(folder, "report.json")).absolute()
        args = ["-rfE", f"--conformance-report={path}", *extra_args]
        code = InMemory(contract, lambda: conformance_classes(record)).run(*args, plugins=[_SkipReasons()])
        entries = json.loads(path.read_text("utf-8"))["providers"] if path.exists() else []
    return code or _weigh(provider, entries)


class _SkipReasons:
    """Tells each reason for skipping once, and how many tests it is for. pytest's own lines have a place each, too."""

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        from pegboard.conformance.report import skip_reason

        reports = terminalreporter.stats.get("skipped", ())
        reasons = Counter(skip_reason(report) for report in reports)
        if reasons:
            terminalreporter.section("skipped tests")
        for reason, count in reasons.items():
            terminalreporter.write_line(f"SKIPPED [{count}] {reason}")


def conformance_classes(record: ProviderRecord) -> dict[str, type[Any]]:
    """Return the classes that test a provider, by name: its own, or one that names it and nothing else.

    Called during pytest's collection, so that pytest can explain assertions. Raises SuiteError, naming plugin and
    field, for a name that leads to no such class.
    """
    suite = import_name(record.contract.suite)
    if not record.conformance:
        return {record.name: type(suite.__name__, (suite,), {"provider": record.name, "__module__": __name__})}
    short = [name.rpartition(":")[2] for name in record.conformance]
    return {
        one if short.count(one) == 1 else name.replace(":", "."): _own_class(record, name, suite)
        for one, name in zip(short, record.conformance, strict=True)
    }


def _own_class(record: ProviderRecord, name: str, suite: type[Any]) -> type[Any]:
    import pytest

    from pegboard.conformance.subject import SuiteError
    from pegboard.conformance.suite import is_suite_class

    where = f"{record.describe()}: conformance={name!r}"
    pytest.register_assert_rewrite(name.partition(":")[0])
    try:
        cls = import_name(name)
    except Exception as error:
        raise SuiteError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
    if not (is_suite_class(cls) and issubclass(cls, suite)):
        raise SuiteError(f"{where} must be a subclass of {record.contract.suite} that says what it tests")
    if cls.factory is not None or cls.provider != record.name:
        what = repr(cls.provider) if cls.factory is None else f"the class {cls.factory.__name__}"
        raise SuiteError(f"{where} tests {what}: it must say provider = {record.name!r}, without a factory")
    own: type[Any] = cls
    return own


def _weigh(provider: str, entries: list[dict[str, Any]]) -> int:
    """Return the exit code of a run in which nothing failed, and what to say where that means little."""
    if not any(entry["counts"].get("passed") for entry in entries):
        print(f"{provider}: no test passed, so nothing was checked")  # noqa: T201
        return 1
    code = 0
    for entry in entries:
        if entry["verdict"] in ("hardly_tested", "nothing_ran"):
            code = HARDLY_TESTED
            skipped, total = entry["counts"].get("skipped", 0), len(entry["tests"])
            print(  # noqa: T201
                f"{provider}: hardly tested: {skipped} of {total} skipped in {entry['class']}, for the reasons above. "
                "A class that gives the tests what they need goes into the record: "
                "Provider(conformance='package.module:TestClass')"
            )
    return code
