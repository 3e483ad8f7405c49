"""``pegboard plugins new``: a working third-party package from templates."""

from __future__ import annotations

import keyword
import re
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template as Text

from pegboard.core import __version__
from pegboard.core.interfaces.contract import Cardinality
from pegboard.core.interfaces.errors import PluginError
from pegboard.core.interfaces.plugin import API_VERSION
from pegboard.core.registry.names import did_you_mean
from pegboard.core.registry.registry import Registry

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_SUFFIX = ".tmpl"
_COMMON = "common"
_ABOUT = "template.toml"


@dataclass(frozen=True, slots=True)
class Template:
    """What a contract's `template.toml` says.

    `about` is what the plugin does, `module` where its class is, `note` a sentence for the README, `config` a config
    that uses it, `provides` the capabilities that it declares.
    """

    contract: str
    about: str
    module: str
    note: str
    config: str
    provides: tuple[str, ...] = ()


def template_contracts() -> list[str]:
    """Contracts that there is a template for."""
    folders = [entry.name for entry in _templates().iterdir() if entry.is_dir()]
    return [name for name in Registry.discover().contracts if name in folders]


def template(contract: str) -> Template:
    """Return the template of one of `template_contracts`."""
    said = tomllib.loads((_templates() / contract / _ABOUT).read_text("utf-8"))
    return Template(contract, **{**said, "provides": tuple(said.get("provides", ()))})


def start_instead(contract: str) -> str:
    """Return what to start from where a contract has no template."""
    return (
        f"`pegboard plugins list` names the installed providers of {contract}, `pegboard plugins show NAME` "
        "the class of one: start from its source"
    )


def create(name: str, contract: str, directory: Path) -> tuple[Path, list[Path]]:
    """Write the package into a new folder of `directory`; returns the folder and its files.

    Raises PluginError for a bad name, a contract without a template, or a folder that is there already.
    """
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise PluginError(f"bad name {name!r}: a lower-case letter, then lower-case letters, digits or '_'")
    known = template_contracts()
    if contract not in known:
        is_contract = contract in Registry.discover().contracts
        instead = f"{start_instead(contract)};" if is_contract else did_you_mean(contract, known)
        parts = (f"there is no template for {contract!r};", instead, f"known: {', '.join(known)}")
        raise PluginError(" ".join(part for part in parts if part))
    distribution = name.replace("_", "-")
    root = directory / distribution
    if root.exists():
        raise PluginError(f"{root} is there already; nothing was written")
    values = _values(name, distribution, template(contract))
    root.mkdir(parents=True)
    files = []
    for folder in (_COMMON, contract):
        for place, source in _walk(_templates() / folder):
            path = root.joinpath(*(Text(part).substitute(values) for part in place))
            path = path.with_name(path.name.removesuffix(_SUFFIX))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(Text(source.read_text("utf-8")).substitute(values), "utf-8")
            files.append(path)
    return root, sorted(files)


def _values(name: str, distribution: str, made: Template) -> dict[str, str]:
    registry = Registry.discover()
    contract = registry.contract(made.contract)
    owner = next((one.plugin.name for one in registry.plugins if contract in one.plugin.contracts), None)
    suite_module, _, suite_class = contract.suite.partition(":")
    class_name = "".join(part.capitalize() for part in name.split("_"))
    more = []
    if contract.suite:
        more.append(f'conformance="{name}.testing:Test{class_name}",')
    if made.provides:
        capabilities = ", ".join(f'"{one}"' for one in sorted(made.provides))
        more.append(f"provides=frozenset({{{capabilities}}}),")
    if contract.cardinality is not Cardinality.MANY:
        more.append("rank=-1,  # never chosen by `use: auto`, only by name")
    config = Text(made.config.strip()).substitute(name=name)
    check = f"    pegboard plugins check {name}\n" if contract.suite else ""
    return {
        "name": name,
        "distribution": distribution,
        "class_name": class_name,
        "contract": made.contract,
        "contract_version": contract.version,
        "suite_module": suite_module,
        "suite_class": suite_class,
        "api": API_VERSION,
        "requires": "" if owner is None else f'    requires=("{owner}",),\n',
        "pegboard": __version__,
        "about": made.about,
        "module": made.module,
        "note": Text(made.note).substitute(name=name),
        "more": "".join(f"            {line}\n" for line in more),
        "check": check,
        "config": config,
        "indented": textwrap.indent(config, "    "),
    }


def _templates() -> Traversable:
    return resources.files("pegboard.core.cli") / "templates"


def _walk(folder: Traversable, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, (*above, entry.name))
        elif entry.name.endswith(_SUFFIX):
            yield (*above, entry.name), entry
