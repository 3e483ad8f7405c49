"""Writes the reference's pages: ``python docs/_build/reference.py docs/reference``.

One page for each contract, from the table of contracts; mkdocstrings adds the classes from their source.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pegboard.core.interfaces.contracts import CONTRACTS, Contract
from pegboard.core.registry.registry import Registry

MEANING = {
    "one": "exactly one, chosen by `use`",
    "many": "an ordered list; the order is the order of the calls",
    "matched": "the first by rank that has no objection, unless `use` names one",
}
MODULES = {
    "requests": ("Requests and batches", ("req", "batch", "forward", "sampling", "messages", "status")),
    "plugins": ("Records, options, hooks and errors", ("plugin", "options", "hooks", "errors", "keys", "layers")),
    "engine": ("The engine and its client", ("client", "engine_view", "tokenizer", "clock")),
}
"""Pages for the modules of `pegboard.core.interfaces` that are not contracts: title and modules."""


def contract_page(contract: Contract, registry: Registry) -> str:
    """Return the page of a contract as Markdown."""
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
    return "\n".join([*lines, "", "## Interface", "", f"::: {module}", ""])


def module_page(title: str, modules: tuple[str, ...]) -> str:
    """Return a page with several modules of the interfaces."""
    return "\n".join([f"# {title}", "", *(f"::: pegboard.core.interfaces.{one}\n" for one in modules)])


def write(folder: Path) -> None:
    """Write all pages into `folder`, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    registry = Registry.discover()
    for contract in CONTRACTS.values():
        (folder / f"{contract.name}.md").write_text(contract_page(contract, registry), "utf-8")
    for name, (title, modules) in MODULES.items():
        (folder / f"{name}.md").write_text(module_page(title, modules), "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
