"""A list of providers that stands in a section, beside the section's own keys: `memory.storage`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest

from pegboard.core.config.compose import ResolvedConfig, compose
from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.interfaces.options import Options
from pegboard.core.interfaces.plugin import Plugin, Provider
from pegboard.core.registry.registry import Registry
from pegboard.tools.config.describe import show
from pegboard.tools.config.schema import schema


class ShelfOptions(Options):
    place: str = "attic"
    """Where it is."""


def shelf(name: str) -> Provider:
    sys.modules.setdefault("pegboard_test_shelf_options", sys.modules[__name__])
    options = "pegboard_test_shelf_options:ShelfOptions"
    return Provider("kv_storage", name, f"acme.shelf:{name}", "", config=options)


def registry() -> Registry:
    return Registry.discover().with_plugins(Plugin("acme", "1.0", (shelf("near"), shelf("far"))), distribution="acme")


def composed(memory: Mapping[str, object] | None = None, overrides: tuple[str, ...] = ()) -> ResolvedConfig:
    values = {"model": {"path": "x"}, **({} if memory is None else {"memory": memory})}
    return compose(data=values, overrides=overrides, env={}, registry=registry())


def test_names_and_options() -> None:
    memory = {"storage": ["far", {"use": "near", "place": "cellar"}], "page_size": 16, "pool": {"use": "mha"}}
    resolved = composed(memory)
    records = resolved.candidates["kv_storage"]
    assert [one.name for one in records] == ["far", "near"]
    assert [resolved.options(one).model_dump() for one in records] == [{"place": "attic"}, {"place": "cellar"}]
    shown = {one.path: one.value for one in show(resolved)}
    assert shown["memory.storage[0].use"] == "far"
    assert shown["memory.storage[1].place"] == "cellar"
    assert (shown["memory.page_size"], shown["memory.pool.use"], shown["memory.storage_block"]) == (16, "mha", 64)
    again = ResolvedConfig.from_json(resolved.to_json(), registry())
    assert again.engine.model_dump() == resolved.engine.model_dump()
    assert memory["storage"] == ["far", {"use": "near", "place": "cellar"}]


def test_options_may_name_them() -> None:
    resolved = composed(overrides=("memory.storage=[near]", "memory.max_total_tokens=5"))
    assert [one.name for one in resolved.candidates["kv_storage"]] == ["near"]
    assert resolved.engine.memory.max_total_tokens == 5


def test_there_need_be_none() -> None:
    """A host pool is chosen only when an engine wants one, so its plugin may be left out."""
    resolved = composed()
    memory: Any = resolved.engine.memory
    assert memory.storage == ()
    assert resolved.candidates["kv_storage"] == ()
    assert [one.name for one in resolved.candidates["host_pool"]] == ["layer_first", "page_first"]
    assert "host_pool" not in resolved.named
    without = compose(data={"model": {"path": "x"}, "plugins": {"disable": ["memory_host"]}}, env={})
    assert without.candidates["host_pool"] == ()


@pytest.mark.parametrize(
    ("memory", "path", "message"),
    [
        ({"storage": ["far", "nearr"]}, "memory.storage[1]", "'nearr' is not installed; did you mean 'near'?"),
        ({"storage": ["far", "far"]}, "memory.storage[1]", "'far' stands in the list twice"),
        ({"storage": [{"use": "near", "plase": 1}]}, "memory.storage[0].plase", "did you mean 'place'?"),
        (
            {"storage": [{"use": "near", "place": [1]}]},
            "memory.storage[0].place",
            "[1] is wrong: input should be a valid string",
        ),
        ({"storage": "near"}, "memory.storage", "'near' must be a list of names"),
        ({"host": {"use": "near"}}, "memory.host.use", "there is one of that name for kv_storage (memory.storage)"),
    ],
    ids=str,
)
def test_what_is_wrong_is_told_with_its_place(memory: Mapping[str, object], path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        composed(memory)
    found = {one.path: one.message for one in caught.value.problems}
    assert found.keys() == {path}
    assert message in found[path]


def test_the_schema_has_them() -> None:
    found = schema(registry())
    text = str(found["$defs"]["MemorySection"]["properties"]["storage"])
    assert "kv_storage_near" in text
    assert found["$defs"]["kv_storage_near"]["properties"]["place"]["default"] == "attic"
