"""The profiler: traces of all threads, into one directory and nowhere else."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard.core.config.compose import compose
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.registry.hooks import Hooks
from pegboard.plugins.profiler.profiler import MAX_STEPS, Profiler

QUICK = {"with_stack": False, "activities": ["CPU"]}


class Steps:
    """The place where a scheduler keeps what it calls after a step, and its controls: an EngineView."""

    def __init__(self) -> None:
        self.on_step: Callable[[], None] | None = None
        self.controls: dict[str, Any] = {}

    def add_control(self, action: str, run: Any) -> None:
        self.controls[action] = run

    def set_on_step(self, on_step: Callable[[], None] | None) -> None:
        self.on_step = on_step

    def step(self) -> None:
        if self.on_step is not None:
            self.on_step()


@pytest.fixture
def steps() -> Steps:
    return Steps()


def started(directory: Path | None, steps: Steps) -> Profiler:
    server = {} if directory is None else {"profile_dir": str(directory)}
    resolved = compose(data={"model": {"path": "x"}, "server": server}, env={})
    built = Hooks.load(resolved.registry, resolved.plugin_options).built
    [profiler] = [made for _, made in built if isinstance(made, Profiler)]
    profiler.engine_started(steps)  # type: ignore[arg-type]
    return profiler


@pytest.fixture
def profiler(tmp_path: Path, steps: Steps) -> Profiler:
    return started(tmp_path / "traces", steps)


def operations(path: str) -> set[str]:
    with gzip.open(path) as file:
        return {str(event.get("name")) for event in json.load(file)["traceEvents"]}


def test_a_trace_holds_what_ran_in_other_threads(profiler: Profiler) -> None:
    with ThreadPoolExecutor(1) as worker:
        worker.submit(torch.ones, 2).result()  # it is there before the profiler is
        profiler.start(QUICK)
        worker.submit(lambda: torch.ones(4, 4) @ torch.ones(4, 4)).result()
        path = profiler.stop({})["path"]
    assert "aten::matmul" in operations(path)  # type: ignore[arg-type]
    assert path.endswith(".trace.json.gz")  # type: ignore[attr-defined]


def test_it_ends_by_itself_after_its_steps(profiler: Profiler, steps: Steps) -> None:
    path = profiler.start({**QUICK, "num_steps": 2})["path"]
    steps.step()
    assert profiler.active
    assert not Path(path).exists()  # type: ignore[arg-type]
    torch.ones(3) + 1
    steps.step()
    assert not profiler.active
    assert steps.on_step is None  # type: ignore[unreachable]
    assert "aten::add" in operations(path)


def test_nothing_is_called_between_traces(profiler: Profiler, steps: Steps) -> None:
    assert steps.on_step is None
    profiler.start(QUICK)
    assert steps.on_step is not None
    profiler.stop({})  # type: ignore[unreachable]
    assert steps.on_step is None


def test_one_at_a_time(profiler: Profiler) -> None:
    first = profiler.start(QUICK)
    with pytest.raises(InvalidRequest, match="already") as caught:
        profiler.start(QUICK)
    assert caught.value.status == 409
    assert profiler.stop({})["path"] == first["path"]
    with pytest.raises(InvalidRequest, match="no trace is being made"):
        profiler.stop({})


def test_two_traces_are_two_files(profiler: Profiler) -> None:
    paths = []
    for _ in range(2):
        profiler.start(QUICK)
        paths.append(profiler.stop({})["path"])
    assert len(set(paths)) == 2


def test_a_directory_below_the_configured_one(profiler: Profiler, tmp_path: Path) -> None:
    profiler.start({**QUICK, "output_dir": "mine/today"})
    assert Path(profiler.stop({})["path"]).parent == tmp_path / "traces" / "mine" / "today"  # type: ignore[arg-type]
    profiler.start({**QUICK, "output_dir": str(tmp_path / "traces" / "absolute")})
    assert Path(profiler.stop({})["path"]).parent == tmp_path / "traces" / "absolute"  # type: ignore[arg-type]


@pytest.mark.parametrize("outside", ["..", "/tmp", "a/../../b", "link/x", "\0"])
def test_no_other_directory(profiler: Profiler, tmp_path: Path, outside: str) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "link").symlink_to(tmp_path)
    with pytest.raises(InvalidRequest) as caught:
        profiler.start({**QUICK, "output_dir": outside})
    assert caught.value.param == "output_dir"
    assert not profiler.active
    assert [one.name for one in tmp_path.iterdir()] == ["traces"]


def test_refused_where_no_directory_is_configured(steps: Steps) -> None:
    with pytest.raises(InvalidRequest, match=r"server\.profile_dir") as caught:
        started(None, steps).start(QUICK)
    assert caught.value.status == 403


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_steps", 0),
        ("num_steps", MAX_STEPS + 1),
        ("num_steps", "5"),
        ("num_steps", True),
        ("activities", []),
        ("activities", "CPU"),
        ("activities", ["RPD"]),
        ("with_stack", 1),
        ("record_shapes", "yes"),
        ("output_dir", 5),
    ],
)
def test_wrong_arguments_name_the_field(profiler: Profiler, field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        profiler.start({field: value})
    assert caught.value.param == field
    assert not profiler.active


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said(profiler: Profiler) -> None:
    with pytest.raises(InvalidRequest, match="no GPU"):
        profiler.start({"activities": ["GPU"]})
    assert not profiler.active


def test_a_trace_that_cannot_be_written_harms_no_step(
    profiler: Profiler, steps: Steps, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(profiler.start({**QUICK, "num_steps": 1})["path"])  # type: ignore[arg-type]
    path.mkdir()
    steps.step()
    assert not profiler.active
    assert "could not be written" in caplog.text


def test_close_writes_what_there_is(profiler: Profiler) -> None:
    profiler.close()
    path = profiler.start(QUICK)["path"]
    profiler.close()
    assert Path(path).exists()  # type: ignore[arg-type]


def test_a_process_may_end_during_a_trace(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from tests.plugins.profiler.test_profiler import Steps, started\n"
        f"started(Path({str(tmp_path)!r}), Steps()).start({QUICK!r})\n"
        "import torch; torch.ones(3) + 1"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [trace] = tmp_path.iterdir()
    assert "aten::add" in operations(str(trace))


@pytest.mark.usefixtures("profiler")
def test_its_actions(steps: Steps) -> None:
    assert set(steps.controls) == {"start_profile", "stop_profile"}
