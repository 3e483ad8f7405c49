"""Preparers of media around the toy, for tests."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pegboard.conformance.checkpoints import write_tiny_tokenizer
from pegboard.plugins.media.api import MediaLimits, MediaSource
from pegboard.plugins.media.frontend.lanes import Lanes
from pegboard.plugins.media.frontend.prepare import Preparer
from pegboard.plugins.media.frontend.sources import Sources
from pegboard.plugins.media.frontend.stats import MediaStats
from pegboard.plugins.media.frontend.store import MediaStore
from pegboard.plugins.media.frontend.worker import Start
from pegboard.toolkit.system.scratch import PREFIX
from tests.fakes.toy_media import add_toy_tokens, toy_settings

TOY = "pegboard.conformance.rig.media_toy:ToyProcessor"
DRILL = "pegboard_media_drills.processor:DrillProcessor"
MOST = 2**28


def start_of(model: Path, folder: Path, **more: Any) -> Start:
    """What a helper is told for a model with the toy's settings."""
    options: dict[str, Any] = {
        "factory": DRILL,
        "options_model": "pegboard.core.interfaces.options:NoOptions",
        "options": {},
        "directory": str(model),
        "hf_config": json.loads((model / "config.json").read_text()),
        "limits": MediaLimits(),
        "media": str(folder),
        "memory": 2**29,
        "seconds": 60.0,
    }
    return Start(**{**options, **more})


def toy_model(path: Path, **media: object) -> Path:
    """A folder with the tokenizer and the config of a model that takes the toy's media, and no weights."""
    if not path.exists():
        path.mkdir()
        write_tiny_tokenizer(path)
        add_toy_tokens(path)
        (path / "config.json").write_text(json.dumps({"toy_media": toy_settings(**media)}))
        (path / "model.safetensors").touch()
    return path


@contextlib.contextmanager
def preparing(
    tmp_path: Path,
    *,
    room: int = MOST,
    most: int = 64,
    at_once: int = 4,
    sources: Sources | None = None,
    helpers: int = 1,
    jobs: int = 500,
    expect: Callable[[MediaSource], int] = lambda source: 0,
    **start: Any,
) -> Iterator[Preparer]:
    """A preparer with files below `tmp_path`, and nothing of it left afterwards."""
    model = toy_model(tmp_path / "model")
    store = MediaStore(tmp_path / f"{PREFIX}test", room)
    stats = MediaStats()
    pool = Lanes(start_of(model, store.directory, **start), stats, helpers=helpers, jobs=jobs)
    preparer = Preparer(store, sources or Sources(2**26), pool, stats, most=most, at_once=at_once, expect=expect)
    try:
        yield preparer
    finally:
        pids = pool.pids()
        preparer.close()
        assert not store.directory.exists()
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def files(preparer: Preparer) -> list[str]:
    """The files of media that are there."""
    return sorted(path.name for path in preparer.store.directory.iterdir() if path.name != "lock")


def picture(height: int = 8, width: int = 8, seed: int = 0) -> Any:
    """Random pixels."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
