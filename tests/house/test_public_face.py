"""`import pegboard`: what it offers, and what it does not load."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pegboard

HEAVY = ("torch", "transformers", "numpy", "pydantic", "fastapi", "zmq", "msgspec")


def test_all_is_what_is_there() -> None:
    assert sorted(pegboard.__all__) == ["Engine", "SamplingParams", "__version__", "compose"]
    assert set(pegboard.__all__) <= set(dir(pegboard))
    assert all(getattr(pegboard, name) is not None for name in pegboard.__all__)


def test_names_are_those_of_their_homes() -> None:
    from pegboard.core.config.compose import compose
    from pegboard.core.engine.engine import Engine
    from pegboard.core.interfaces.sampling import SamplingParams

    assert (pegboard.Engine, pegboard.SamplingParams, pegboard.compose) == (Engine, SamplingParams, compose)


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match="it has Engine, SamplingParams, __version__, compose"):
        _ = pegboard.Engin


def test_nothing_heavy_is_loaded() -> None:
    code = f"import pegboard, sys; pegboard.__version__; print([one for one in {HEAVY} if one in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "[]"


def test_the_module_is_the_command_line() -> None:
    command = [sys.executable, "-m", "pegboard", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout == f"pegboard {pegboard.__version__}\n"
