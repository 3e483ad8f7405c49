"""The pages about hooks, samplers, prefix caches and gates work as they say: every block, in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from tests.docs.test_plugins_md import Reader, blocks

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=1)


def follow(name: str, folder: Path, model: Path) -> str:
    """Do what a page says; what its last block that prints anything printed."""
    page = DOCS / name
    reader = Reader(folder, model)
    for block in blocks(page):
        try:
            reader.follow(block)
        except AssertionError as error:
            raise AssertionError(f"{page.name}, line {block.line}: {error}") from None
    programs = [block for block in blocks(page) if block.language == "python" and not block.file]
    return next(text for text in (reader.printed[block.text] for block in reversed(programs)) if text)


def test_a_sampler(tmp_path: Path, model: Path) -> None:
    assert follow("writing-a-sampler.md", tmp_path, model) == "400 custom_params.top_n_sigma\n"


def test_a_prefix_cache(tmp_path: Path, model: Path) -> None:
    first, second = map(int, follow("writing-a-prefix-cache.md", tmp_path, model).split())
    assert first == 0
    assert second > 0


def test_a_gate(tmp_path: Path, model: Path) -> None:
    assert follow("writing-a-gate.md", tmp_path, model).startswith("400 params.not_before ")


def test_a_stage(tmp_path: Path, model: Path) -> None:
    assert follow("writing-a-stage.md", tmp_path, model) == "True\n"


def test_hooks(tmp_path: Path, model: Path) -> None:
    printed = follow("hooks.md", tmp_path, model)
    assert printed.count("\n") == 2
    shown = (DOCS / "hooks.md").read_text().partition("It prints\n\n")[2]
    assert shown.startswith("".join(f"    {line}\n" for line in printed.splitlines()))
