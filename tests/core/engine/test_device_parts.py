"""Device parts need something that gives them payloads, and a prefix cache that promises needs its part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.config.compose import compose
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.errors import PluginError
from pegboard.core.interfaces.hooks import hookimpl
from pegboard.core.interfaces.plugin import Plugin, Provider
from pegboard.core.interfaces.stage import DevicePart
from pegboard.core.registry.registry import Registry
from pegboard.plugins.cache_none.cache import NoCache


class Loader(DevicePart):
    name = "acme.far"
    loads = True


class Stranger(DevicePart):
    name = "acme.lost"


class BringsLoader:
    @hookimpl
    def device_parts(self) -> list[DevicePart]:
        return [Loader()]


class BringsStranger:
    @hookimpl
    def device_parts(self) -> list[DevicePart]:
        return [Stranger()]


class FarCache(NoCache):
    """Would have what it promises loaded by a part."""

    loader = Loader.name


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoints"), "llama", num_hidden_layers=1)


def start(checkpoint: Path, *hooks: type, cache: str = "far") -> Engine:
    providers = (Provider("prefix_cache", "far", f"{__name__}:FarCache", ""),)
    plugin = Plugin("acme", "1", providers, hooks=tuple(f"{__name__}:{one.__name__}" for one in hooks))
    config: dict[str, Any] = {
        "model": {"path": str(checkpoint), "dtype": "float32"},
        "attention": {"use": "torch"},
        "memory": {"max_total_tokens": 256},
        "prefix_cache": {"use": cache},
        "plugins": {"acme": True},
    }
    return Engine(compose(data=config, env={}, registry=Registry.discover().with_plugins(plugin, distribution="acme")))


def test_a_part_that_loads_needs_no_stage(checkpoint: Path) -> None:
    for cache in ("far", "radix"):
        with start(checkpoint, BringsLoader, cache=cache) as engine:
            assert engine.generate([[5, 6, 7]], {"max_new_tokens": 2, "temperature": 0})[0].token_ids


def test_any_other_part_has_the_name_of_a_stage(checkpoint: Path) -> None:
    with pytest.raises(PluginError, match=r"device parts without a stage of their name: acme\.lost"):
        start(checkpoint, BringsStranger, cache="radix")


def test_a_cache_whose_loader_is_missing_stops_the_start(checkpoint: Path) -> None:
    with pytest.raises(PluginError, match=r"'far' needs a device part 'acme\.far', which no plugin brings"):
        start(checkpoint)
