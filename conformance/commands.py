"""``pegboard plugins check`` and ``pegboard plugins matrix``: commands that run the suites and read their reports."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pegboard.core.cli.config import Json
from pegboard.toolkit.system.output import check_writable, write, write_json, write_table
from pegboard.toolkit.system.output import files as named_files

if TYPE_CHECKING:
    from pegboard.core.registry.records import ProviderRecord

REPORT = Path("reports/conformance.json")
_ROW = {"contract", "provider", "distribution", "distribution_version", "class", "capabilities", "verdict", "counts"}
"""What a report says of each provider."""


def check(
    names: Annotated[list[str], typer.Argument(help="Plugins, providers, or contract/provider.")],
    as_json: Json = False,
    report: Annotated[Path | None, typer.Option(help="Write the conformance report to this file as JSON.")] = None,
) -> None:
    """Run the conformance tests of each provider: those that its record names, or else its contract's suite.

    Exit code 1: a test failed, or none passed. 8: nothing failed, but most tests that apply were skipped.
    """
    from pegboard.core.interfaces.errors import PluginError
    from pegboard.core.registry.registry import Registry

    if report:
        with named_files("--report"):
            report.parent.mkdir(parents=True, exist_ok=True)
        check_writable(report, "--report")
    registry = Registry.discover()
    records = {record: None for name in names for record in registry.named(name)}
    runnable = [record for record in records if record.contract.suite]
    if not runnable:
        raise PluginError(f"no conformance suite yet for {', '.join(one.provider.contract for one in records)}")
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        code, merged = _run_all(runnable)
    if report:
        report.write_text(json.dumps(merged, indent=2) + "\n", "utf-8")
    if as_json:
        write_json(merged)
    for record in records:
        if record not in runnable:
            typer.echo(f"{record.provider.contract}/{record.name}: its contract has no conformance suite yet", err=True)
    raise typer.Exit(code)


def _run_all(records: Sequence[ProviderRecord]) -> tuple[int, dict[str, Any]]:
    """Run the tests of each provider. Return the worst exit code and the reports as one."""
    from pegboard.conformance.check import HARDLY_TESTED, run

    worst = 0
    merged: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, record in enumerate(records):
            part = Path(folder) / f"{number}.json"
            code = run(record.provider.contract, record.name, report=part)
            if code and worst in (0, HARDLY_TESTED):
                worst = code
            if part.exists():
                _merge_report(merged, json.loads(part.read_text("utf-8")))
    return worst, merged


def matrix(
    reports: Annotated[list[Path] | None, typer.Argument(help="Reports written with --conformance-report.")] = None,
    as_json: Json = False,
) -> None:
    """Show which provider passed which suite, from conformance reports."""
    from pegboard.core.interfaces.errors import PegboardError

    merged: dict[str, Any] = {}
    for path in reports or [REPORT]:
        try:
            _merge_report(merged, json.loads(path.read_text("utf-8")))
        except FileNotFoundError:
            raise PegboardError(
                f"there is no report {path}; write one with: pytest --conformance-report={path}, "
                f"or: pegboard plugins check NAME --report {path}"
            ) from None
        except OSError as error:
            raise PegboardError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise PegboardError(f"{path} is not a conformance report: {error}") from None
    if as_json:
        write_json(merged)
        return
    rows = [
        (
            one["contract"],
            one["provider"],
            f"{one['distribution']} {one['distribution_version']}".strip() or one["class"],
            ", ".join(one["capabilities"]),
            one["verdict"],
            ", ".join(f"{count} {outcome}" for outcome, count in one["counts"].items()),
        )
        for one in merged.get("providers", ())
    ]
    write_table(("contract", "provider", "from", "capabilities", "verdict", "tests"), rows)
    for broken in merged.get("errors", ()):
        write(f"! {broken['class']} cannot be run: {broken['message']}")


def _merge_report(merged: dict[str, Any], report: Any) -> None:
    """Merge the reports of several runs; the environment is the last one's. Raises ValueError for what is not a
    report.
    """
    providers = report.get("providers") if isinstance(report, dict) else None
    if not isinstance(providers, list) or not all(isinstance(one, dict) and one.keys() >= _ROW for one in providers):
        raise ValueError("it has no list of providers with their verdicts")
    for key, value in report.items():
        if isinstance(value, list):
            merged.setdefault(key, []).extend(value)
        else:
            merged[key] = value
