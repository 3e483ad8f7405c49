"""What a newcomer sees first, against the code: README.md, pictures, pages about other servers and about trouble."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from benchmarks import chart
from docs._build import board, coming_from
from docs._build.config import builtin_registry
from docs._build.svg import THEMES
from pegboard.core.config.shape import Shape
from pegboard.core.config.suggest import other_servers
from pegboard.tools.config.describe import core_keys_of, option_keys

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text("utf-8")
OF_OTHERS = {"/v1/load_lora_adapter", "Address already in use"}
"""What docs/troubleshooting.md quotes that does not come from Pegboard."""


def keys() -> set[str]:
    """Return every key of the config and every section."""
    registry = builtin_registry()
    found = {key.path for key in core_keys_of(Shape.of(registry))}
    found |= {key.path for name in registry.contracts for one in registry.providers(name) for key in option_keys(one)}
    return found | {".".join(path.split(".")[:depth]) for path in found for depth in range(1, path.count(".") + 1)}


def cells(table: str) -> list[list[str]]:
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[1:]]


def code(text: str) -> list[str]:
    """Return the code spans of a page or of a cell; blocks are none."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def figures() -> set[str]:
    """Return paths of `/server_info`, which docs/operation.md has and its test checks: not keys of the config."""
    table = (DOCS / "operation.md").read_text("utf-8").partition("| path | what it has |")[2].partition("\n\n")[0]
    return {
        f"scheduler.{name.removeprefix('scheduler.')}" for row in cells("| path |" + table) for name in code(row[0])
    }


@pytest.mark.parametrize("theme", THEMES)
def test_pictures_are_what_their_commands_draw(theme: str) -> None:
    images = DOCS / "images"
    assert (images / f"board-{theme}.svg").read_text("utf-8") == board.board(THEMES[theme]), "run `make docs`"
    assert (images / f"speed-{theme}.svg").read_text("utf-8") == chart.chart(THEMES[theme]), "run `make docs`"


def test_badges_and_foot_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert (DOCS / "images" / "badges.svg").read_text("utf-8") == board.badges(project), "run `make docs`"
    foot = f"copyright: Pegboard {project['version']}, {project['license']}\n"
    assert foot in (ROOT / "mkdocs.yml").read_text("utf-8")


def test_pegs_are_providers() -> None:
    registry = builtin_registry()
    by_path = {contract.config_path: contract.name for contract in registry.contracts.values()}
    for key, names in board.PEGS.items():
        there = {record.name for record in registry.providers(by_path[key])}
        assert set(names) <= there, f"{key}: the board has pegs that no plugin provides"


def test_the_chart_has_the_figures_of_the_pages() -> None:
    """Those that README.md names in words, too."""
    labels = [[bar.label for bar in bars] for _, bars in chart.on_a_cpu()]
    assert [one[2] for one in labels] == ["102", "624", "1,250"]
    assert [one[1] for one in labels] == ["35", "236", "609"]
    ratios = [bars[1].value / bars[0].value for _, bars in chart.on_a_gpu()]
    assert [f"{min(ratios):.2f}", f"{max(ratios):.2f}"] == ["1.16", "1.20"]
    said = " ".join((README, (DOCS / "gpu.md").read_text("utf-8")))
    assert said.count("1.16 to 1.20 times") == 2
    assert "102, 624 and 1,250" in said
    assert "35, 236 and 609" in said
    performance = (DOCS / "performance.md").read_text("utf-8").partition("## Against vLLM")[2].partition("\n## ")[0]
    demo = [row[3] for row in cells(performance)[:3]]
    assert f"so it is faster: {demo[0]}, {demo[1]} and {demo[2]} tokens per second" in README


def test_features_name_plugins_and_keys_that_there_are() -> None:
    rows = cells(README.partition("## What it does\n")[2].partition("\n## ")[0])
    assert len(rows) >= 12
    plugins = {record.plugin.name for record in builtin_registry().plugins}
    known = keys()
    for feature, names, paths, page in rows:
        assert set(code(names)) <= plugins, feature
        assert set(code(paths)) <= known, feature
        assert "](docs/" in page, feature


def test_pictures_that_pages_show_exist() -> None:
    shown = re.findall(r'(?:src|srcset)="([^"]+)"', README)
    assert len(shown) == 4
    assert all((ROOT / name).is_file() for name in shown)


def test_the_page_of_other_servers_is_current() -> None:
    text = (DOCS / "coming-from.md").read_text("utf-8")
    assert text == coming_from.render(), "run `make docs`"
    flags = {f"--{name.replace('_', '-')}" for name in other_servers(Shape.of(builtin_registry()))}
    assert flags <= set(code(text))
    assert {path for row in cells(text) if len(row) == 3 for path in code(row[1])} <= keys()


def test_messages_of_the_page_of_trouble_are_in_the_code() -> None:
    sources = [path for folder in ("core", "toolkit", "plugins", "tools") for path in (ROOT / folder).rglob("*.py")]
    joined = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text("utf-8") for path in sorted(sources)))
    joined += (DOCS / "metrics.md").read_text("utf-8") + (ROOT / "deploy/prometheus/alerts.yml").read_text("utf-8")
    text = (DOCS / "troubleshooting.md").read_text("utf-8")
    quoted = [words for row in cells(text) for words in code(row[0])]
    assert len(quoted) > 25
    assert [words for words in quoted if words not in joined and words not in OF_OTHERS | figures()] == []


@pytest.mark.parametrize("page", ["README.md", "docs/gpu.md", "docs/troubleshooting.md"])
def test_keys_that_pages_name_exist(page: str) -> None:
    spans = code((ROOT / page).read_text("utf-8"))
    known = keys() | figures()
    sections = {path.partition(".")[0] for path in known}
    named = [re.split(r"[:=]", span)[0].strip() for span in spans]
    named = [name for name in named if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", name)]
    assert len(named) > 2
    assert not [name for name in named if name.partition(".")[0] in sections and name not in known]
