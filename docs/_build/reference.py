"""Writes the reference's pages: ``python docs/_build/reference.py docs/reference``.

One page for each contract, from the table of contracts, and one for each package of the toolkit; mkdocstrings adds classes
and functions from their source.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from pegboard import toolkit
from pegboard.core.interfaces.contract import Contract
from pegboard.core.registry.registry import Registry

MEANING = {
    "one": "exactly one, chosen by `use`",
    "many": "an ordered list; the order is the order of the calls",
    "matched": "the first by rank that has no objection, unless `use` names one",
}
MODULES = {
    "requests": ("Requests and batches", ("req", "batch", "forward", "sampling", "messages", "status")),
    "plugins": (
        "Records, options, hooks and errors",
        ("plugin", "contract", "options", "hooks", "choosing", "errors", "keys", "layers"),
    ),
    "engine": ("The engine and its client", ("client", "engine_view", "tokenizer", "clock")),
}
"""Pages for the modules of `pegboard.core.interfaces` that are not contracts: title and modules."""


def contract_page(contract: Contract, registry: Registry, home: str) -> str:
    """Return the page of a contract as Markdown. Its module is shown on the page of the contract `home`: references lead
    to one place.
    """
    module, _, name = contract.interface.partition(":")
    suite = contract.suite.replace(":", ".")
    providers = [
        f"| `{one.name}` | {one.plugin.name} | {one.provider.summary} |" for one in registry.providers(contract.name)
    ]
    lines = [
        f"# {contract.name}",
        "",
        f"A provider of this contract {contract.summary}.",
        "",
        f"- **Config**: `{contract.config_path}`, {MEANING[contract.cardinality.value]}",
        f"- **Version**: {contract.version}",
        f"- **Class**: `{module}.{name}`",
        f"- **Suite**: {f'`{suite}`' if suite else 'none yet'}",
        "",
        *(["| provider | plugin | |", "|---|---|---|", *providers, ""] if providers else []),
    ]
    if contract.capabilities:
        lines += ["## Capabilities", "", "A provider declares the optional parts that it has.", ""]
        lines += ["| capability | meaning |", "|---|---|"]
        lines += [f"| `{name}` | {meaning} |" for name, meaning in contract.capabilities.items()]
    shown = f"::: {module}" if home == contract.name else f"[`{module}`]({home}.md), shared with `{home}`."
    return "\n".join([*lines, "", "## Interface", "", shown, ""])


def module_page(title: str, modules: tuple[str, ...]) -> str:
    """Return a page with several modules of the interfaces."""
    return "\n".join([f"# {title}", "", *(f"::: pegboard.core.interfaces.{one}\n" for one in modules)])


def toolkit_pages(homes: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield names and texts of the toolkit's pages: one that lists all modules, and one for each package. Modules that a
    contract's page shows, by `homes`, are only linked.
    """
    top = Path(toolkit.__path__[0])
    lines = ["# Toolkit", "", summary(top / "__init__.py"), ""]
    loose = sorted(path for path in top.glob("*.py") if path.stem != "__init__")
    for package in sorted(path.parent for path in top.glob("*/__init__.py")):
        modules = sorted(path for path in package.glob("*.py") if path.stem != "__init__")
        name, about = f"toolkit-{package.name}", summary(package / "__init__.py")
        lines += [f"## [{package.name}]({name}.md)", "", about, "", *_table(f"{package.name}.", modules)]
        yield name, "\n".join([f"# toolkit.{package.name}", "", about, "", *_full(f"{package.name}.", modules, homes)])
    if loose:
        lines += _full("", loose, homes)
    yield "toolkit", "\n".join(lines)


def summary(file: Path) -> str:
    """Return the first paragraph of a module's docstring."""
    return " ".join((ast.get_docstring(ast.parse(file.read_text("utf-8"))) or "").partition("\n\n")[0].split())


def _table(prefix: str, modules: list[Path]) -> list[str]:
    rows = [f"| `{prefix}{path.stem}` | {summary(path).replace('|', chr(92) + '|')} |" for path in modules]
    return ["| module | |", "|---|---|", *rows, ""]


def _full(prefix: str, modules: list[Path], homes: Mapping[str, str]) -> list[str]:
    lines: list[str] = []
    for path in modules:
        module = f"{toolkit.__name__}.{prefix}{path.stem}"
        shown = f"[`{module}`]({homes[module]}.md)" if module in homes else f"::: {module}"
        lines += [f"## {path.stem}", "", shown, ""]
    return lines


def write(folder: Path) -> None:
    """Write all pages into `folder`, which is created; older ones leave."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in folder.glob("*.md"):
        page.unlink()
    registry = Registry.discover()
    homes: dict[str, str] = {}
    for contract in registry.contracts.values():
        home = homes.setdefault(contract.interface.partition(":")[0], contract.name)
        (folder / f"{contract.name}.md").write_text(contract_page(contract, registry, home), "utf-8")
    for name, (title, modules) in MODULES.items():
        (folder / f"{name}.md").write_text(module_page(title, modules), "utf-8")
    for name, text in toolkit_pages(homes):
        (folder / f"{name}.md").write_text(text, "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
