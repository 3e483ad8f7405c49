"""``pegboard plugins list|show|check|matrix|new``."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pegboard.core.cli.output import check_writable, write, write_json, write_table
from pegboard.core.cli.output import files as named_files

if TYPE_CHECKING:
    from pegboard.core.registry.records import ProviderRecord
    from pegboard.core.registry.registry import Registry

app = typer.Typer(no_args_is_help=True, help="Look at installed plugins, check them, start a new one.")

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
REPORT = Path("reports/conformance.json")
_ROW = {"contract", "provider", "distribution", "distribution_version", "class", "capabilities", "verdict", "counts"}
"""What a report says of each provider."""


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List every installed provider by contract, then what is broken or in conflict."""
    from pegboard.core.interfaces.contracts import CONTRACTS
    from pegboard.core.registry.registry import Registry

    registry = Registry.discover()
    records = [record for contract in CONTRACTS for record in registry.providers(contract)] + list(registry.stray)
    if as_json:
        write_json(
            {
                "providers": [_plain(record) for record in records],
                "plugins": [_plain_plugin(one) for one in registry.plugins],
                "broken": [{"name": one.name, "from": str(one.origin), "error": str(one)} for one in registry.broken],
                "conflicts": list(registry.conflicts),
            }
        )
    else:
        rows = [
            (one.provider.contract, one.name, one.plugin.name, str(one.origin), one.problem or one.provider.summary)
            for one in records
        ]
        write_table(("contract", "provider", "plugin", "from", ""), rows)
        for text in (*(str(one) for one in registry.broken), *registry.conflicts):
            write(f"! {text}")
    if registry.conflicts:
        raise typer.Exit(1)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A plugin, a provider, or contract/provider.")], as_json: Json = False
) -> None:
    """Show what a plugin or provider offers, needs and can be told."""
    from pegboard.core.config.describe import option_keys
    from pegboard.core.registry.registry import Registry

    found = []
    for record in _find(Registry.discover(), name):
        keys = option_keys(record) if not record.problem else ()
        options = [{"path": k.path, "type": k.type, "default": k.default, "meaning": k.meaning} for k in keys]
        found.append({**_plain(record), "options": options})
    if as_json:
        write_json(found)
        return
    for one in found:
        write(f"{one['contract']}/{one['provider']}: {one['summary']}")
        for key in (
            *("plugin", "from", "config", "factory", "rank", "provides", "requires", "suite", "conformance", "problem"),
        ):
            value = one[key]
            if value not in ("", []):
                write(f"  {key:11} {', '.join(value) if isinstance(value, list) else value}")
        for option in one["options"]:
            write(f"  {option['path']}: {option['type']}, default {option['default'] or 'none'}. {option['meaning']}")
        write()


@app.command()
def check(
    names: Annotated[list[str], typer.Argument(help="Plugins, providers, or contract/provider.")],
    as_json: Json = False,
    report: Annotated[Path | None, typer.Option(help="Write the conformance report to this file as JSON.")] = None,
) -> None:
    """Run the conformance tests of each provider: those that its record names, or else its contract's suite.

    Exit code 1: a test failed, or none passed. 8: nothing failed, but most tests that apply were skipped.
    """
    from pegboard.conformance.check import HARDLY_TESTED, run
    from pegboard.core.interfaces.errors import PluginError
    from pegboard.core.registry.registry import Registry

    if report:
        with named_files("--report"):
            report.parent.mkdir(parents=True, exist_ok=True)
        check_writable(report, "--report")
    registry = Registry.discover()
    records = {record: None for name in names for record in _find(registry, name)}
    runnable = [record for record in records if record.contract.suite]
    if not runnable:
        raise PluginError(f"no conformance suite yet for {', '.join(one.provider.contract for one in records)}")
    worst = 0
    merged: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, record in enumerate(runnable):
            part = Path(folder) / f"{number}.json"
            with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
                code = run(record.provider.contract, record.name, report=part)
            if code and worst in (0, HARDLY_TESTED):
                worst = code
            if part.exists():
                _merge_report(merged, json.loads(part.read_text("utf-8")))
    if report:
        report.write_text(json.dumps(merged, indent=2) + "\n", "utf-8")
    if as_json:
        write_json(merged)
    for record in records:
        if record not in runnable:
            typer.echo(f"{record.provider.contract}/{record.name}: its contract has no conformance suite yet", err=True)
    raise typer.Exit(worst)


@app.command()
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
            raise PegboardError(f"{path} is no conformance report: {error}") from None
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


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the plugin and of its provider, such as my_policy.")] = "",
    contract: Annotated[
        str, typer.Option(help="The contract to implement; --list says which have a template.")
    ] = "schedule_policy",
    directory: Annotated[Path, typer.Option(help="Where to create the package's folder.")] = Path(),
    list_: Annotated[bool, typer.Option("--list", help="List the templates, and write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Write a working package with a plugin: entry point, provider, options, conformance test, config."""
    from pegboard.core.cli.new import create
    from pegboard.core.interfaces.contracts import CONTRACTS

    if list_:
        _list_templates(as_json)
        return
    if not name:
        raise typer.BadParameter("give the new plugin a name, such as my_policy (or --list the templates)")
    with named_files("--directory"):
        root, files = create(name, contract, directory)
    if as_json:
        write_json({"root": str(root), "files": [str(path) for path in files]})
        return
    for path in files:
        write(str(path))
    check = f"pegboard plugins check {name} && " if CONTRACTS[contract].suite else ""
    write(f"\nNext: pip install -e {root} && {check}pytest {root}")


def _list_templates(as_json: bool) -> None:
    from pegboard.core.cli.new import start_instead, template, template_contracts
    from pegboard.core.interfaces.contracts import CONTRACTS

    made = [template(contract) for contract in template_contracts()]
    others = [contract for contract in CONTRACTS if contract not in template_contracts()]
    if as_json:
        write_json(
            {
                "templates": [{"contract": one.contract, "about": one.about} for one in made],
                "without": [{"contract": one, "start": start_instead(one)} for one in others],
            }
        )
        return
    rows = [(one.contract, one.about) for one in made]
    write_table(("contract", "the template's plugin"), rows)
    write(f"\nWithout a template: {', '.join(others)}. {start_instead('a contract')}.")


def _find(registry: Registry, name: str) -> list[ProviderRecord]:
    """What `name` means: contract/provider, a provider of any contract, or all providers of a plugin."""
    from pegboard.core.interfaces.errors import PluginError
    from pegboard.core.registry.names import did_you_mean

    contract, slash, provider = name.partition("/")
    if slash:
        record = registry.get(contract, provider)
        found = [record] if record else []
    else:
        plugin = registry.plugin(name)
        own = plugin.plugin.providers if plugin else ()
        records = (registry.get(one.contract, one.name) for one in own)
        found = [one for one in records if one] or list(registry.find(name))
    if found:
        return found
    for broken in registry.broken:
        if broken.name == name:
            raise PluginError(str(broken))
    known = {one.plugin.name for one in registry.plugins}
    known |= {provider.name for one in registry.plugins for provider in one.plugin.providers}
    hint = did_you_mean(name, sorted(known)) or "`pegboard plugins list` shows what is installed"
    raise PluginError(f"no plugin or provider {name!r} is installed; {hint}")


def _plain(record: ProviderRecord) -> dict[str, Any]:
    from pegboard.core.interfaces.contracts import CONTRACTS

    provider = record.provider
    contract = CONTRACTS.get(provider.contract)
    return {
        "contract": provider.contract,
        "contract_version": provider.contract_version,
        "provider": provider.name,
        "summary": provider.summary,
        "plugin": record.plugin.name,
        "from": str(record.origin),
        "factory": provider.factory,
        "config": provider.config,
        "rank": provider.rank,
        "provides": sorted(provider.provides),
        "requires": [
            f"{one.contract}.{one.capability}" if one.capability else one.contract for one in provider.requires
        ],
        "suite": contract.suite if contract else "",
        "conformance": list(record.conformance),
        "problem": record.problem,
    }


def _plain_plugin(loaded: Any) -> dict[str, Any]:
    plugin = loaded.plugin
    return {
        "name": plugin.name,
        "version": plugin.version,
        "from": str(loaded.origin),
        "summary": plugin.summary,
        "hooks": list(plugin.hooks),
    }


def _merge_report(merged: dict[str, Any], report: Any) -> None:
    """Reports of several runs as one; the environment is the last one's. Raises ValueError for what is no report."""
    providers = report.get("providers") if isinstance(report, dict) else None
    if not isinstance(providers, list) or not all(isinstance(one, dict) and one.keys() >= _ROW for one in providers):
        raise ValueError("it has no list of providers with their verdicts")
    for key, value in report.items():
        if isinstance(value, list):
            merged.setdefault(key, []).extend(value)
        else:
            merged[key] = value
