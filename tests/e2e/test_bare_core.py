"""The core without features: an engine in which their plugins cannot be imported gives the tokens that it gives with
them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.registry.registry import Registry
from tests.e2e.bare_core import LENGTHS, arrangements

FEATURES = (
    "adapters",
    "console",
    "grammar",
    "grammar",
    "http_guard",
    "kv_handoff",
    "kv_tiers",
    "media",
    "operator_controls",
    "prefill_in_parts",
    "profiler",
    "row_outputs",
    "sessions_in_memory",
    "speculation",
    "speculation",
    "stop_expressions",
    "thinking_budget",
)
"""Plugins that bring a feature. Whatever requires one of them is left out as well."""


def left_out() -> list[str]:
    """Return the features, and the plugins that do not work without one."""
    plugins = {loaded.plugin.name: loaded.plugin for loaded in Registry.discover().plugins}
    assert set(FEATURES) <= plugins.keys()
    names = set(FEATURES)
    while more := {name for name, plugin in plugins.items() if names & set(plugin.requires)} - names:
        names |= more
    return sorted(names)


def told(checkpoint: Path, names: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.e2e.bare_core", str(checkpoint), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def bare(checkpoints: Path) -> dict[str, Any]:
    return told(tiny_checkpoint(checkpoints, "llama"), left_out())


@pytest.fixture(scope="module")
def full(checkpoints: Path) -> dict[str, Any]:
    return told(tiny_checkpoint(checkpoints, "llama"), [])


def test_no_feature_was_imported(bare: dict[str, Any], full: dict[str, Any]) -> None:
    assert not set(bare["plugins"]) & set(left_out())
    assert "row_outputs" in full["plugins"], "nothing shows that the other engine has them"


@pytest.mark.parametrize("arrangement", [name for name, _ in arrangements()])
def test_the_tokens_are_the_same(arrangement: str, bare: dict[str, Any], full: dict[str, Any]) -> None:
    without, whole = bare["answers"][arrangement], full["answers"][arrangement]
    assert sum(map(len, without["tokens"])) > 20 * len(LENGTHS)
    assert without["retractions"] > 0
    assert without == whole
