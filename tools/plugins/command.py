"""``pegboard plugins list|show|new|pipeline``; `check` and `matrix` come from the conformance kit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pegboard.core.cli.commands import PluginsGroup
from pegboard.core.cli.config import Json
from pegboard.toolkit.system.output import files as named_files
from pegboard.toolkit.system.output import write, write_json, write_table
from pegboard.tools.plugins.pipeline import pipeline

if TYPE_CHECKING:
    from pegboard.core.registry.discovery import LoadedPlugin
    from pegboard.core.registry.records import ProviderRecord

app = typer.Typer(cls=PluginsGroup, no_args_is_help=True, help="List and check installed plugins, or write a new one.")


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List every installed provider by contract, then what is broken or in conflict."""
    from pegboard.core.registry.registry import Registry

    registry = Registry.discover()
    records = [record for contract in registry.contracts for record in registry.providers(contract)] + list(
        registry.stray
    )
    if as_json:
        write_json(
            {
                "providers": [_plain(record) for record in records],
                "plugins": [_plain_plugin(loaded) for loaded in registry.plugins],
                "broken": [
                    {"name": broken.name, "from": str(broken.origin), "error": str(broken)}
                    for broken in registry.broken
                ],
                "conflicts": list(registry.conflicts),
            }
        )
    else:
        rows = [
            (one.provider.contract, one.name, one.plugin.name, str(one.origin), one.problem or one.provider.summary)
            for one in records
        ]
        rows += [
            ("(hooks)", ", ".join(found.plugin.hooks), found.plugin.name, str(found.origin), found.plugin.summary)
            for found in registry.plugins
            if not found.plugin.providers
        ]
        write_table(("contract", "provider", "plugin", "from", ""), rows)
        for text in (*(str(broken) for broken in registry.broken), *registry.conflicts):
            write(f"! {text}")
    if registry.conflicts:
        raise typer.Exit(1)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A plugin, a provider, or contract/provider.")], as_json: Json = False
) -> None:
    """Show what a plugin or provider provides and requires, and its options."""
    from pegboard.core.registry.registry import Registry
    from pegboard.tools.config.describe import body_keys, option_keys

    registry = Registry.discover()
    plugin = registry.plugin(name)
    if plugin is not None and as_json and not plugin.plugin.providers:
        write_json([_plain_plugin(plugin)])
        return
    found = []
    for record in registry.named(name) if plugin is None or plugin.plugin.providers else ():
        keys = option_keys(record) if not record.problem else ()
        options = [{"path": k.path, "type": k.type, "default": k.default, "meaning": k.meaning} for k in keys]
        body = [{"name": k.path, "type": k.type, "meaning": k.meaning} for k in body_keys(record)]
        found.append((_plain(record), options, body))
    if as_json:
        write_json([{**one, "options": options, "body": body} for one, options, body in found])
        return
    for one, options, body in found:
        write(f"{one['contract']}/{one['provider']}: {one['summary']}")
        for key in (
            *("plugin", "from", "config", "factory", "rank", "provides", "requires", "suite", "conformance", "problem"),
        ):
            value = one[key]
            if value not in ("", []):
                write(f"  {key:11} {', '.join(value) if isinstance(value, list) else value}")
        for option in options:
            write(f"  {option['path']}: {option['type']}, default {option['default'] or 'none'}. {option['meaning']}")
        for field in body:
            write(f"  {field['name']} (in request bodies): {field['type']}. {field['meaning']}".rstrip())
        write()
    if plugin is not None and (plugin.plugin.hooks or not found):
        _write_plugin(plugin)


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the plugin and of its provider, such as my_policy.")] = "",
    contract: Annotated[
        str, typer.Option(help="The contract to implement; --list shows those with a template.")
    ] = "schedule_policy",
    directory: Annotated[Path, typer.Option(help="Where to create the package's folder.")] = Path(),
    list_: Annotated[bool, typer.Option("--list", help="List the templates, and write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Write a working package with a plugin: entry point, provider, options, conformance test, config."""
    from pegboard.core.registry.registry import Registry
    from pegboard.tools.plugins.new import create

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
    check = f"pegboard plugins check {name} && " if Registry.discover().contract(contract).suite else ""
    write(f"\nNext: pip install -e {root} && {check}pytest {root}")


app.command("pipeline")(pipeline)


def _list_templates(as_json: bool) -> None:
    from pegboard.core.registry.registry import Registry
    from pegboard.tools.plugins.new import start_instead, template, template_contracts

    made = [template(contract) for contract in template_contracts()]
    others = [contract for contract in Registry.discover().contracts if contract not in template_contracts()]
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


def _write_plugin(loaded: LoadedPlugin) -> None:
    from pegboard.core.registry.hooks import options_model
    from pegboard.tools.config.describe import keys_of

    plain = _plain_plugin(loaded)
    write(f"{loaded.plugin.name}: {loaded.plugin.summary}")
    for key in ("from", "hooks", "requires", "contracts", "fields"):
        value = plain[key]
        if value or key == "hooks":
            write(f"  {key:11} {', '.join(value) or 'none' if isinstance(value, list) else value}")
    for option in keys_of(options_model(loaded), f"plugins.{loaded.plugin.name}"):
        write(f"  {option.path}: {option.type}, default {option.default or 'none'}. {option.meaning}")
    write()


def _plain(record: ProviderRecord) -> dict[str, object]:
    provider = record.provider
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
            f"{requirement.contract}.{requirement.capability}" if requirement.capability else requirement.contract
            for requirement in provider.requires
        ],
        "suite": record.contract.suite,
        "conformance": list(record.conformance),
        "problem": record.problem,
    }


def _plain_plugin(loaded: LoadedPlugin) -> dict[str, object]:
    plugin = loaded.plugin
    return {
        "name": plugin.name,
        "version": plugin.version,
        "from": str(loaded.origin),
        "summary": plugin.summary,
        "hooks": list(plugin.hooks),
        "requires": list(plugin.requires),
        "contracts": [f"{contract.name} ({contract.config_path})" for contract in plugin.contracts],
        "fields": [f"{section or 'top level'}: {name}" for section, name in plugin.fields.items()],
    }
