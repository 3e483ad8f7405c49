"""The documentation's site and the project's door, as far as they can be checked without building the site."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs._build.config import builtin_registry

ROOT = Path(__file__).parents[2]
DOOR = (
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "CODE_OF_CONDUCT.md",
    ".editorconfig",
    ".clang-format",
    ".pre-commit-config.yaml",
    ".github/PULL_REQUEST_TEMPLATE.md",
    ".github/ISSUE_TEMPLATE/bug.yml",
    ".github/ISSUE_TEMPLATE/feature.yml",
)


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name Python functions."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, suffix, node: suffix)


def pages(nav: Any) -> Iterator[str]:
    for entry in nav if isinstance(nav, list) else nav.values():
        if isinstance(entry, str):
            yield entry
        else:
            yield from pages(entry)


@pytest.fixture(scope="module")
def navigation() -> list[str]:
    return list(pages(yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader)["nav"]))


def test_every_page_is_in_the_navigation(navigation: list[str]) -> None:
    docs = ROOT / "docs"
    written = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    written = {name for name in written if not name.startswith(("reference/", "decisions/0"))}
    assert {name for name in navigation if not name.startswith("reference/")} == written
    assert len(navigation) == len(set(navigation))


def write_reference(folder: Path) -> None:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "_build" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write(folder)


def test_every_contract_has_a_page_of_reference(navigation: list[str], tmp_path: Path) -> None:
    write_reference(tmp_path / "reference")
    made = {f"reference/{path.name}" for path in (tmp_path / "reference").glob("*.md")}
    wrong = made ^ {name for name in navigation if name.startswith("reference/")}
    assert not wrong, f"mkdocs.yml, nav, lists exactly the contracts under reference/; wrong: {sorted(wrong)}"
    assert {f"reference/{name}.md" for name in builtin_registry().contracts} <= made


def test_the_reference_has_every_module_of_the_toolkit_once(tmp_path: Path) -> None:
    write_reference(tmp_path)
    shown = re.findall(r"^::: (pegboard\.toolkit\S*)$", _text(tmp_path.glob("*.md")), re.MULTILINE)
    top = ROOT / "toolkit"
    modules = [path for path in top.rglob("*.py") if path.stem != "__init__"]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules]
    assert sorted(shown) == sorted(f"pegboard.{name}" for name in names)
    overview = (tmp_path / "toolkit.md").read_text("utf-8")
    undescribed = re.findall(r"^\| `(\S+)` \| *\|$", overview, re.MULTILINE)
    assert not undescribed, f"these have no docstring: {undescribed}"
    assert "| `speculation.judging` | " in overview


def _text(files: Iterable[Path]) -> str:
    return "\n".join(file.read_text("utf-8") for file in files)


def test_the_index_lists_every_decision() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", (folder / "index.md").read_text("utf-8"))
    assert listed == sorted(path.name for path in folder.glob("0*.md"))


@pytest.mark.parametrize("name", DOOR)
def test_the_door_is_there(name: str) -> None:
    assert (ROOT / name).read_text("utf-8").strip()


def test_the_public_forge_runs_what_ci_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    assert "bash .ci/run" in [step.get("run") for step in workflow["jobs"]["ci"]["steps"]]
