"""Building a scheduler: what is chosen, what is refused before weights are read, and what is closed again."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.config.compose import compose
from pegboard.core.engine import build, sizing
from pegboard.core.engine.build import build_scheduler
from pegboard.core.engine.device import executor_of, loop_of
from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.pipeline.executor import Done


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=1)


def built(path: Path, **sections: Any) -> Any:
    data = {"model": {"path": str(path), "dtype": "float32"}, "attention": {"use": "torch"}, **sections}
    return build_scheduler(compose((), data={"memory": {"max_total_tokens": 512}, **data}), Path())


def test_the_parts_are_those_of_the_config(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    sections = {"prefix_cache": {"use": "block"}, "memory": {"max_total_tokens": 512, "page_size": 16}}
    with caplog.at_level(logging.INFO):
        one = built(model, scheduler={"policy": {"use": "lof"}, "max_running_requests": 3}, **sections)
    try:
        components = one.scheduler.components
        assert type(components.memory.cache).__name__ == "BlockCache"
        assert (components.memory.allocator.num_pages, components.memory.allocator.page_size) == (32, 16)
        assert components.memory.rows.host.shape[0] == 4, "a row for each running request, and one for padding"
        assert "prefix_cache block" in caplog.text
        assert "schedule_policy lof" in caplog.text
    finally:
        one.close()


@pytest.mark.parametrize("layers", [0, 1])
def test_chunks_are_those_of_stages_that_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int) -> None:
    """Scheduler, runner and memory get one answer."""

    def chunk_size(config: object, device: object, *, splits: bool = False) -> int:
        return 96 if splits else 48

    monkeypatch.setattr(sizing, "chunk_size", chunk_size)
    path = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=2)
    scheduler = {"split_prefill_layers": layers, "max_running_requests": 2}
    one = built(path, scheduler=scheduler, runner={"use": "layered"})
    try:
        chunk = 96 if layers else 48
        assert one.scheduler.planner.chunk_size == chunk
        assert one.runner.ctx.max_new_tokens == chunk
    finally:
        one.close()


def test_a_device_that_is_not_there_is_refused(model: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match=r"model.device: 'cuda', but torch .* finds no GPU here"):
        built(model, model={"path": str(model), "device": "cuda"})


def test_triton_launches_on_the_device_that_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It launches on the current one, whichever its arguments are on."""

    class Enough(Exception):
        pass

    def set_device(device: torch.device) -> None:
        raise Enough(str(device))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    with pytest.raises(Enough, match="cuda:1"):
        built(model, model={"path": str(model), "device": "cuda:1"})


@pytest.mark.parametrize(
    ("loop", "device", "beside", "runs"),
    [
        ("auto", "cpu", False, "NormalLoop"),
        ("overlap", "cpu", True, "OverlapLoop"),
        ("auto", "cuda", False, "OverlapLoop"),
        ("overlap", "cuda", False, "OverlapLoop"),
        ("normal", "cuda", False, "NormalLoop"),
    ],
)
def test_the_loop_of_a_device(
    model: Path, monkeypatch: pytest.MonkeyPatch, loop: str, device: str, beside: bool, runs: str
) -> None:
    """A GPU computes beside the host, so that steps overlap without a thread."""
    chosen = torch.device(device)
    monkeypatch.setattr(build, "loop_of", lambda name, where, lanes: loop_of(name, chosen, lanes))
    where = {"where": lambda payload: Done(threading.current_thread().name)}
    monkeypatch.setattr(build, "executor_of", lambda name, worker, parts, *_: executor_of(name, worker, where, chosen))
    one = built(model, scheduler={"loop": loop})
    try:
        assert str(one.scheduler.components.executor.ask("where", None)).startswith("forward") is beside
        assert type(one.scheduler.loop).__name__ == runs
    finally:
        one.close()


def test_an_end_that_the_model_cannot_choose_is_left_out(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        file = copy / name
        fields = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**fields, "eos_token_id": [2, 10**6]}))
    one = built(copy)
    one.close()
    assert "eos_token_id: 1000000 is not among the model's" in caplog.text


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_closing_ends_its_threads(model: Path, loop: str) -> None:
    before = set(threading.enumerate())
    one = built(model, scheduler={"loop": loop})
    one.close()
    assert set(threading.enumerate()) <= before
