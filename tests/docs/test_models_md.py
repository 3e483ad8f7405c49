"""The page of models is what its generator writes, and the page of limits is found from where users look."""

from __future__ import annotations

from pathlib import Path

from docs._build.config import builtin_registry
from docs._build.models import render
from pegboard.core.config.shape import Shape
from pegboard.core.config.suggest import other_servers

ROOT = Path(__file__).parents[2]


def test_the_page_of_models_is_current() -> None:
    text = (ROOT / "docs" / "models.md").read_text("utf-8")
    assert text == render(builtin_registry()), "run `make docs`"


def test_limits_are_linked_from_where_users_look() -> None:
    assert "](docs/limits.md)" in (ROOT / "README.md").read_text("utf-8")
    assert "](limits.md)" in (ROOT / "docs" / "index.md").read_text("utf-8")
    told = {
        answer.note
        for answer in other_servers(Shape.of(builtin_registry())).values()
        if answer.note.startswith("not supported yet")
    }
    assert all(note.endswith("(docs/limits.md)") for note in told)
