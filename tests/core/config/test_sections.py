"""The core's own sections: defaults, bounds, descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field, ValidationError

from docs._build.config import builtin_registry, render
from pegboard.core.config.section import UseSection
from pegboard.core.config.sections import EngineConfig
from pegboard.core.config.shape import CORE, Shape, sections_of
from pegboard.core.interfaces.contracts import CONTRACTS
from pegboard.tools.config.describe import type_text

ROOT = Path(__file__).parents[3]

RELIED_ON = (
    "model.path",
    "model.dtype",
    "model.use",
    "runner.use",
    "apis",
    "server.host",
    "server.port",
    "prefix_cache.use",
    "attention.use",
    "memory.page_size",
    "memory.max_total_tokens",
    "scheduler.policy.use",
    "scheduler.max_running_requests",
    "scheduler.chunked_prefill_size",
    "plugins.disable",
)


BUILT_IN = Shape.of(builtin_registry())
"""With what built-in plugins add."""


def test_every_key_is_described() -> None:
    keys = ((f"{path}.{key}", info) for path, one in sections_of(BUILT_IN) for key, info in one.model_fields.items())
    assert [path for path, info in keys if not info.description] == []


@pytest.mark.parametrize("path", RELIED_ON)
def test_keys_that_scripts_rely_on(path: str) -> None:
    parent, _, key = path.rpartition(".")
    section = CORE.section_at(parent)
    assert section is not None
    assert key in section.model_fields


def test_every_contract_has_its_place() -> None:
    assert {one.name for one in (*CORE.uses.values(), *CORE.lists.values())} == set(CONTRACTS)
    for path in CORE.uses:
        section = CORE.section_at(path)
        assert section is not None, f"core/config/sections.py needs a section at {path}"
        assert issubclass(section, UseSection), path
    for path in CORE.lists:
        parent, _, key = path.rpartition(".")
        around = CORE.section_at(parent)
        wanted = (
            f"core/config/sections.py needs `{key}: tuple[UseSection, ...] = ()` in the section {parent or 'of all'}"
        )
        assert around is not None, wanted
        assert key in around.model_fields, wanted
        assert around.model_fields[key].annotation == tuple[UseSection, ...], wanted


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (Annotated[int, Field(gt=0)], "integer > 0"),
        (Annotated[float | None, Field(gt=0)], "number > 0"),
        (Annotated[str | int, Field(ge=2)], "string or integer ≥ 2"),
        (tuple[str, ...], "list of strings"),
        (tuple[Annotated[int, Field(gt=0, lt=65536)], ...], "list of integers > 0, < 65536"),
        (Mapping[str, int], "map of string to integer"),
    ],
    ids=str,
)
def test_types_read_as_operators_say_them(annotation: Any, text: str) -> None:
    """Bounds of an optional number are the number's."""
    assert type_text(annotation) == text


def test_a_config_is_frozen_all_the_way_down() -> None:
    config = EngineConfig.model_validate({"model": {"path": "x"}})
    with pytest.raises(ValidationError, match="frozen"):
        config.server.port = 1


@pytest.mark.parametrize(
    "values",
    [
        {"server": {"port": 70000}},
        {"server": {"port": "http"}},
        {"memory": {"page_size": 0}},
        {"scheduler": {"new_token_ratio": 1.5}},
        {"scheduler": {"prefill_first": "perhaps"}},
        {"model": {"path": "x", "device": "gpu"}},
        {"model": {"path": "x", "dtype": "int4"}},
        {"log_level": "loud"},
        {"unknown": 1},
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        EngineConfig.model_validate({"model": {"path": "x"}, **values})


def test_a_chunk_holds_at_least_a_page() -> None:
    base = {"model": {"path": "x"}, "memory": {"page_size": 16}}
    with pytest.raises(ValidationError, match="a chunk must hold at least one page"):
        EngineConfig.model_validate({**base, "scheduler": {"chunked_prefill_size": 8}})
    assert EngineConfig.model_validate({**base, "scheduler": {"chunked_prefill_size": 0}})  # type: ignore[truthy-bool]


def test_docs_config_md_is_current() -> None:
    text = (ROOT / "docs" / "config.md").read_text("utf-8")
    assert text == render(builtin_registry()), "run: make docs"


def test_the_docs_list_every_key_and_provider() -> None:
    text = (ROOT / "docs" / "config.md").read_text("utf-8")
    for path, one in sections_of(BUILT_IN):
        for key in one.model_fields:
            below = f"{path}.{key}" if path else key
            assert BUILT_IN.section_at(below) or f"| `{below}` |" in text, below
    registry = builtin_registry()
    for contract in registry.contracts:
        for record in registry.providers(contract):
            assert f"**`{record.name}`**" in text
