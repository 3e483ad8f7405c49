"""``pegboard plugins new``: a working third-party package from templates."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

from pegboard.core.interfaces.contracts import CONTRACTS
from pegboard.core.interfaces.errors import PluginError
from pegboard.core.interfaces.plugin import API_VERSION
from pegboard.core.names import did_you_mean
from pegboard.core.version import __version__

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_SUFFIX = ".tmpl"
_COMMON = "common"


def template_contracts() -> list[str]:
    """Contracts that there is a template for."""
    folders = [entry.name for entry in _templates().iterdir() if entry.is_dir()]
    return [name for name in CONTRACTS if name in folders]


def create(name: str, contract: str, directory: Path) -> tuple[Path, list[Path]]:
    """Write the package into a new folder of `directory`; returns the folder and its files.

    Raises PluginError for a bad name, a contract without a template, or a folder that is there already.
    """
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise PluginError(f"bad name {name!r}: a lower-case letter, then lower-case letters, digits or '_'")
    known = template_contracts()
    if contract not in known:
        parts = (f"there is no template for {contract!r};", did_you_mean(contract, known), f"known: {', '.join(known)}")
        raise PluginError(" ".join(part for part in parts if part))
    distribution = name.replace("_", "-")
    root = directory / distribution
    if root.exists():
        raise PluginError(f"{root} is there already; nothing was written")
    found = CONTRACTS[contract]
    values = {
        "name": name,
        "distribution": distribution,
        "class_name": "".join(part.capitalize() for part in name.split("_")),
        "contract": contract,
        "contract_version": found.version,
        "config_path": found.config_path,
        "suite_module": found.suite.partition(":")[0],
        "suite_class": found.suite.partition(":")[2],
        "api": API_VERSION,
        "pegboard": __version__,
    }
    files = []
    for folder in (_COMMON, contract):
        for place, source in _walk(_templates() / folder):
            path = root.joinpath(*(Template(part).substitute(values) for part in place))
            path = path.with_name(path.name.removesuffix(_SUFFIX))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(Template(source.read_text("utf-8")).substitute(values), "utf-8")
            files.append(path)
    return root, sorted(files)


def _templates() -> Traversable:
    return resources.files("pegboard.core") / "templates"


def _walk(folder: Traversable, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, (*above, entry.name))
        elif entry.name.endswith(_SUFFIX):
            yield (*above, entry.name), entry
