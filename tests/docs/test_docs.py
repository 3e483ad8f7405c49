"""The documentation against the tree: files, commands, keys and names that it mentions exist; links, a house test."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from docs._build.config import builtin_registry
from pegboard.core.config.compose import compose
from pegboard.core.registry.hooks import HOOK_NAMES
from pegboard.core.registry.registry import Registry
from pegboard.tools.plugins.new import template_contracts

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "reference"),
]
CONTRACTS = builtin_registry().contracts
README = PAGES[0].read_text("utf-8")
PLUGINS = (ROOT / "docs" / "plugins.md").read_text("utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text("utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    folders = "core|plugins|conformance|tools|pegboard|tests|docs|benchmarks|examples"
    for name in re.findall(rf"`((?:{folders})/[\w/.-]*\.\w+)`", page.read_text("utf-8")):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_the_models_of_our_own_network_are_named() -> None:
    """As its plugin says."""
    [dense] = [one.plugin for one in Registry.discover().plugins if one.plugin.name == "model_dense"]
    models = dense.summary.removesuffix(" in our own code")
    assert models != dense.summary
    assert models in " ".join(ARCHITECTURE.split())


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in re.findall(r"`make ([\w-]+)", README + ARCHITECTURE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


def test_commands_exist() -> None:
    from pegboard.core.cli.main import app

    root: Any = get_command(app)
    for words in re.findall(r"(?:`|\$ )pegboard ([a-z]+(?: [a-z]+)?)", README + ARCHITECTURE + PLUGINS):
        first, _, second = words.partition(" ")
        command = root.get_command(None, first)
        assert command is not None, f"pegboard {words}"
        if second and hasattr(command, "commands"):
            assert second in command.list_commands(None), f"pegboard {words}"


def test_the_readme_config_is_one() -> None:
    (text,) = blocks(README, "yaml")
    resolved = compose(data=yaml.safe_load(text), env={})
    assert resolved.engine.server.port == 31000


def test_the_readme_plugin_is_the_one_that_a_test_runs() -> None:
    parts = [block for block in blocks(README, "python") if block.startswith("# src/")]
    assert len(parts) == 2
    assert all(block in PLUGINS for block in parts)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_architecture_lists_every_contract_and_its_providers(contract: str) -> None:
    rows = [line for line in ARCHITECTURE.splitlines() if line.startswith(f"| `{contract}` |")]
    assert len(rows) == 1, f"the table of docs/architecture.md needs one row for {contract}"
    builtin = [record.name for record in Registry.discover().providers(contract) if record.origin.builtin]
    missing = [name for name in (*builtin, CONTRACTS[contract].config_path) if name not in rows[0]]
    assert not missing, f"name these in the row of {contract} in docs/architecture.md"
    assert CONTRACTS[contract].cardinality.value in rows[0]


def test_every_policy_is_described() -> None:
    text = (ROOT / "docs" / "policies.md").read_text("utf-8")
    builtin = [record.name for record in Registry.discover().providers("schedule_policy") if record.origin.builtin]
    assert not [name for name in builtin if f"| `{name}`" not in text], "give these a row in docs/policies.md"


@pytest.mark.parametrize("hook", HOOK_NAMES)
def test_every_hook_is_described(hook: str) -> None:
    assert f"`{hook}`" in ARCHITECTURE
    assert f"`{hook}`" in PLUGINS


@pytest.mark.parametrize("contract", CONTRACTS)
def test_plugins_says_how_to_start_with_every_contract(contract: str) -> None:
    table = PLUGINS.partition("## Where to start")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    found = [cells for cells in rows if f"`{contract}`" in cells[1]]
    assert len(found) == 1, f'"Where to start" of docs/plugins.md needs one row for {contract}'
    none = found[0][2].strip() == "none"
    assert none == (contract not in template_contracts()), f"{contract}: 'none' where there is no template"


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = [int(page.name[:4]) for page in sorted((ROOT / "docs" / "decisions").glob("0*.md"))]
    written_meanwhile = {51, 52, 53, 54}  # by others, in branches of their own
    assert sorted({*numbers, *written_meanwhile}) == list(range(1, numbers[-1] + 1))
