"""What the plugin brings: nothing unless it is enabled, and nothing where weights cannot be replaced."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from pegboard import Engine
from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.rig.model_references import model_checkpoint
from pegboard.conformance.stage import stage_context
from pegboard.core.interfaces.errors import ConfigError, InvalidRequest
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.weight_updates.hooks import WeightUpdateHooks
from pegboard.plugins.weight_updates.options import WeightUpdateFields, WeightUpdateSection


class Options(NoOptions):
    """The plugin's options with a section."""

    def section(self, model: object) -> WeightUpdateFields:  # type: ignore[override]
        return WeightUpdateFields(weight_updates=WeightUpdateSection(enabled=True))


def test_who_cannot_replace_them_is_named() -> None:
    for who, key in (("runner 'x'", "runner.use"), ("model family 'y'", "model.use")):
        ctx = dataclasses.replace(stage_context(), lacking={"updates": who}.get)
        with pytest.raises(ConfigError, match=f"{key}: the {who} does not replace weights"):
            WeightUpdateHooks(Options()).pipeline_stages(ctx)


def test_nothing_without_a_switch(tmp_path: Path) -> None:
    config = {"model": {"path": str(tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1))}}
    with Engine.from_config(config) as engine:
        assert not any(feature.startswith("weights.") for feature in engine.info.features)
        assert "weight_updates" not in engine.services
        with pytest.raises(InvalidRequest, match="unknown control action"):
            engine.control("update_weights", path=str(tmp_path))


def test_a_model_that_lends_no_weights(tmp_path: Path) -> None:
    """The reason is told at the start, before anybody needs an update."""
    path = model_checkpoint(tmp_path, "qwen2_vl")
    config = {"model": {"path": str(path)}, "runner": {"use": "layered"}, "weight_updates": {"enabled": True}}
    with pytest.raises(ConfigError, match=r"weight_updates.enabled: weights cannot be replaced: .*encoder"):
        Engine.from_config(json.loads(json.dumps(config)))
