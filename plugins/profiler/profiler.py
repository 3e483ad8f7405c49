"""Profiler: torch.profiler traces of the scheduler process, started and stopped while it serves."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.hooks import hookimpl
from pegboard.plugins.profiler.options import ProfilerFields

if TYPE_CHECKING:
    from torch.profiler import profile

    from pegboard.core.interfaces.engine_view import EngineView
    from pegboard.core.interfaces.options import Options

logger = logging.getLogger(__name__)

MAX_STEPS = 1000
"""Most steps of one trace: it is kept in memory until it ends, at some hundred bytes per operation."""

_ACTIVITIES = ("CPU", "GPU", "CUDA")


@dataclass(frozen=True, slots=True)
class _Orders:
    """What a trace shall hold. `directory` is there and below the one that the config allows."""

    directory: Path
    num_steps: int
    activities: frozenset[str]
    with_stack: bool
    record_shapes: bool


class Profiler:
    """The control actions `start_profile` and `stop_profile`.

    One trace at a time. It sees operations of all threads, since the overlap loop computes in one of its own. Its end
    (after `num_steps` steps, by `stop_profile`, or after MAX_STEPS) writes ``<id>.trace.json.gz`` for chrome://tracing
    or Perfetto; requests wait while that is written. While no trace is made, steps call nothing. Without
    `server.profile_dir` in the config everything is refused.
    """

    def __init__(self, options: Options) -> None:
        directory = options.section(ProfilerFields).profile_dir
        self._root = Path(directory).absolute() if directory else None
        self._set_on_step: Callable[[Callable[[], None] | None], None] = lambda call: None
        self._profile: profile | None = None
        self._left = 0
        self._file = Path()

    @property
    def active(self) -> bool:
        return self._profile is not None

    @hookimpl
    def engine_started(self, engine: EngineView) -> None:
        self._set_on_step = engine.set_on_step
        engine.add_control("start_profile", self.start)
        engine.add_control("stop_profile", self.stop)

    def start(self, args: dict[str, object]) -> dict[str, object]:
        """Begin. `args`: output_dir, num_steps, activities, with_stack, record_shapes; all may be missing or None.

        Answers the trace's path. Raises InvalidRequest: 400 for what is wrong, 403 where no directory is configured,
        409 where a trace is being made.
        """
        if self.active:
            raise InvalidRequest(f"a trace is being made already, into {self._file}", code="busy", status=409)
        orders = self._orders(args)
        self._file = orders.directory / f"{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**9:09d}"
        self._file = self._file.with_name(self._file.name + ".trace.json.gz")
        made = _make_profile(orders)
        made.start()
        self._profile = made
        # A process that ends with a trace under way crashes in torch.
        atexit.register(self.close)
        self._left = orders.num_steps
        self._set_on_step(self._stepped)
        logger.info("profiling into %s", self._file)
        return {"path": str(self._file), "num_steps": orders.num_steps}

    def stop(self, args: dict[str, object]) -> dict[str, object]:
        """End the trace and write it. Answers its path. Raises InvalidRequest (409) where none is being made."""
        if not self.active:
            raise InvalidRequest("no trace is being made: it was not started, or is through", code="idle", status=409)
        self._end()
        return {"path": str(self._file)}

    def close(self) -> None:
        """Write what there is. Happens at the process's end by itself."""
        if self.active:
            self._end()

    def _stepped(self) -> None:
        self._left -= 1
        if self._left <= 0:
            try:
                self._end()
            except Exception:
                # No caller waits for this, so only the log can tell; requests have nothing to do with it.
                logger.exception("the trace %s could not be written", self._file)

    def _end(self) -> None:
        made, self._profile = self._profile, None
        self._set_on_step(None)
        atexit.unregister(self.close)
        if made is not None:
            made.stop()
            made.export_chrome_trace(str(self._file))
        logger.info("wrote the trace %s", self._file)

    # ---- arguments ------------------------------------------------------------------------------------------------

    def _orders(self, args: dict[str, object]) -> _Orders:
        return _Orders(
            directory=self._directory(args.get("output_dir")),
            num_steps=_num_steps(args.get("num_steps")),
            activities=_activities(args.get("activities")),
            with_stack=_flag(args, "with_stack", True),
            record_shapes=_flag(args, "record_shapes", False),
        )

    def _directory(self, wanted: object) -> Path:
        if self._root is None:
            raise InvalidRequest(
                "this server writes no traces: set server.profile_dir to the directory that they may be written to",
                code="not_configured",
                status=403,
            )
        if wanted is not None and not isinstance(wanted, str):
            raise InvalidRequest("output_dir must be a string", param="output_dir")
        root = self._root.resolve()
        try:
            directory = (root / (wanted or "")).resolve()
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"output_dir is not a path: {error}", param="output_dir") from None
        if not directory.is_relative_to(root):
            raise InvalidRequest(
                f"output_dir {wanted!r} is not below server.profile_dir ({root})", param="output_dir", status=403
            )
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequest(f"{directory} cannot be made: {error.strerror}", param="output_dir") from None
        return directory


def _num_steps(value: object) -> int:
    if value is None:
        return MAX_STEPS
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_STEPS:
        raise InvalidRequest(f"num_steps must be from 1 to {MAX_STEPS}, got {value!r}", param="num_steps")
    return value


def _activities(value: object) -> frozenset[str]:
    if value is None:
        return frozenset(_ACTIVITIES)
    if not isinstance(value, list) or not value or not all(one in _ACTIVITIES for one in value):
        raise InvalidRequest(
            f"activities must be a list of {', '.join(_ACTIVITIES)}; got {value!r}", param="activities"
        )
    return frozenset(value)


def _flag(args: dict[str, object], name: str, default: bool) -> bool:
    value = args.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, got {value!r}", param=name)
    return value


def _make_profile(orders: _Orders) -> profile:
    import torch
    from torch.profiler import ProfilerActivity, profile

    wanted = []
    if "CPU" in orders.activities:
        wanted.append(ProfilerActivity.CPU)
    if orders.activities & {"GPU", "CUDA"} and torch.cuda.is_available():
        wanted.append(ProfilerActivity.CUDA)
    if not wanted:
        raise InvalidRequest("there is no GPU here; profile the activity CPU", param="activities")
    return profile(
        activities=wanted,
        with_stack=orders.with_stack,
        record_shapes=orders.record_shapes,
        # A profiler sees its own thread alone, unless told otherwise; forward passes may run in another.
        experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
    )
