"""What all tests share."""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import tiers
from tests.triton_interpreter import hasten

pytest_plugins = ["pytester"]


KERNELS = (
    "pegboard.toolkit.kernels.functions",
    "pegboard.plugins.attn_triton.kernels",
    "pegboard.plugins.attn_triton.tile_kernels",
    "pegboard.plugins.linear_triton.decoding",
    "pegboard.plugins.linear_triton.kernels",
    "pegboard.plugins.sampler_triton.kernels",
)


def _import_triton() -> bool:
    """Import Triton and all kernels as an interpreter where there is no GPU. Whether that was done.

    Whether its functions are compiled or interpreted is settled when it is imported, and transformers imports it; that
    of our own kernels when they are, and some tests only look at their launches. So this comes first. The variable does
    not stay set: `attention.use: auto` would choose the interpreter, which is slow, in every test that serves. Tests
    that want it use the fixture `interpreted_triton`. TRITON_INTERPRET=0 turns all of it off.
    """
    if os.environ.get("TRITON_INTERPRET") == "0" or importlib.util.find_spec("triton") is None:
        return False
    if shutil.which("nvidia-smi") is not None:
        return False
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        language = importlib.import_module("triton.language")
        hasten(importlib.import_module("triton.runtime.interpreter"), language)
        for module in KERNELS:
            importlib.import_module(module)
    return True


INTERPRETED = _import_triton()

# Processes that tests start see the same plugins as the tests: those that fail on purpose, too.
DRILLS = str(Path(__file__).parent / "drills")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (DRILLS, os.environ.get("PYTHONPATH"))))

# A shell that starts the tests in the background has Ctrl-C ignored, which commands under test would inherit.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Tests give the same answer each time, and none fails since a busy machine stood still. `make soak` explores.
EXPLORE = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("explore", EXPLORE)
hypothesis.settings.register_profile("repeat", EXPLORE, derandomize=True, database=None, print_blob=True)
hypothesis.settings.load_profile("repeat")


def pytest_configure() -> None:
    """Collect no garbage while tests are imported: each of some thousand looks would go through all that is there."""
    gc.disable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of which nothing would run."""
    return tiers.is_left_out(collection_path, config.option.markexpr) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.mark(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none, before its fixtures look for one."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available() and "PEGBOARD_GPU_DEVICE" not in os.environ:
            pytest.skip("needs a CUDA device")


def pytest_collection_finish() -> None:
    """Leave the items and the libraries, which live to the end, to themselves: only what tests make is looked at.

    All workers import the same, so that one of them looks for what the imports left open.
    """
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
        gc.collect()
    gc.freeze()
    gc.set_threshold(*SELDOM)
    gc.enable()


def pytest_unconfigure() -> None:
    """Look through everything once, where pytest would report what is found: not in a worker.

    pytest does so twice after this, and has little to look through.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    # Some libraries look for what is left when Python ends.
    atexit.register(gc.unfreeze)


SELDOM = 50_000, 20, 20
"""After how many new objects garbage is collected: Python's 700 took an eighth of all tests. Each file's tests end with
a collection of what they left."""


@pytest.fixture(scope="module", autouse=True)
def nothing_left_open() -> Iterator[None]:
    """Show a file's own tests the sockets and files that they left open, not those that run when garbage is collected.

    What lives on was imported, or belongs to the whole run: it is left to itself from here.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def interpreted_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attn_triton run on the CPU in this test. Skips where Triton is missing or compiles for a GPU."""
    if not INTERPRETED:
        pytest.skip("Triton's interpreter is not there: Triton is missing, compiles for a GPU, or was turned off")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
