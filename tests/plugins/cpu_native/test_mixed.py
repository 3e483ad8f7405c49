"""Prompts and running requests share a batch with the native runner, unless the config says otherwise."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.engine.engine import Engine
from tests.plugins.cpu_native import instruction_sets  # noqa: F401 - skips where there are none


@pytest.mark.parametrize(
    ("scheduler", "runner", "mixed"),
    [
        ({}, "cpu_native", True),
        ({"mixed_chunk": False}, "cpu_native", False),
        ({}, "layered", False),
        ({"mixed_chunk": True}, "layered", True),
        ({"split_prefill_layers": 1}, "layered", False),
    ],
)
def test_a_runner_that_prefers_it_gets_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, scheduler: dict[str, Any], runner: str, mixed: bool
) -> None:
    checkpoint = tiny_checkpoint(tmp_path, "llama", hidden_size=64, num_attention_heads=2, head_dim=32)
    config = {
        "model": {"path": str(checkpoint), "dtype": "bfloat16", "device": "cpu"},
        "memory": {"max_total_tokens": 512},
        "runner": {"use": runner},
        "scheduler": scheduler,
    }
    with caplog.at_level(logging.INFO), Engine.from_config(config) as engine:
        assert bool(engine.built.scheduler.settings.mixed_chunk) == mixed
    said = "scheduler.mixed_chunk: on, automatic: the runner prefers it" in caplog.messages
    assert said == (mixed and "mixed_chunk" not in scheduler)
