"""The key `scheduler.split_prefill_layers`, and when it brings the stage."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.conformance.stage import stage_context
from pegboard.core.config.compose import compose
from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.interfaces.layers import ModelSpec
from pegboard.core.interfaces.stage import Stage
from pegboard.core.registry.hooks import Hooks
from pegboard.plugins.prefill_in_parts.hooks import PartHooks
from pegboard.plugins.prefill_in_parts.stage import PrefillInParts

LAYERS = 4
NAME = "prefill_in_parts"


def brought(layers: int, runner: str = "split_prefill") -> list[Stage]:
    resolved = compose(data={"model": {"path": "m"}, "scheduler": {"split_prefill_layers": layers}})
    hooks = Hooks.load(resolved.registry, resolved.plugin_options)
    (made,) = [made for _, made in hooks.built if isinstance(made, PartHooks)]
    layer: Any = None
    spec = ModelSpec("suite", 251, 8, 512, (layer,) * LAYERS, ())
    return made.pipeline_stages(stage_context(runner=frozenset({runner}), runner_name="other", spec=spec))


@pytest.mark.parametrize(("layers", "there"), [(0, False), (1, True), (LAYERS - 1, True), (LAYERS, False)])
def test_it_is_there_where_a_prefill_can_be_split(layers: int, there: bool) -> None:
    stages = brought(layers)
    assert [type(stage) for stage in stages] == [PrefillInParts] * there
    assert all(stage.splits for stage in stages)


def test_a_runner_that_cannot_pause_is_refused() -> None:
    assert brought(0, "graph") == []
    with pytest.raises(
        ConfigError, match=r"the runner 'other' cannot pause between layers.*choose another runner\.use"
    ):
        brought(2, "graph")


def test_decodes_share_a_step_in_one_way() -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.mixed_chunk and scheduler\.split_prefill_layers exclude each"):
        compose(data={"model": {"path": "m"}, "scheduler": {"mixed_chunk": True, "split_prefill_layers": 2}})


def test_the_key_belongs_to_the_plugin() -> None:
    with pytest.raises(ConfigError, match=rf"scheduler\.split_prefill_layers: it needs the plugin '{NAME}'"):
        compose(data={"model": {"path": "m"}, "plugins": {NAME: False}, "scheduler": {"split_prefill_layers": 2}})
