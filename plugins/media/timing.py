"""How long media take to be encoded: on the device's own clock where that computes beside the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from pegboard.core.interfaces.executor import Pending

E = TypeVar("E", bound="DeviceEvent")


class DeviceEvent(Protocol):
    """The part of torch.Event that is used here. `record` notes its time once the device has done what was launched
    before it.
    """

    def record(self, stream: torch.Stream | None, /) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self: E, other: E, /) -> float: ...


class Timer(Protocol):
    """Runs from when it is made until `stop`."""

    def stop(self) -> Pending[float]:
        """Return what waits for the device, and then has the seconds."""


class HostTimer:
    """Times what is done when its call returns."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._took = 0.0

    def stop(self) -> HostTimer:
        self._took = time.perf_counter() - self._started
        return self

    def result(self) -> float:
        """Return the seconds."""
        return self._took


class DeviceTimer:
    """Times what was launched in between on an asynchronous device, and waits for it in `result` alone: a step that
    encodes can be planned after while it runs, as after a batch.
    """

    def __init__(self, event: Callable[[], DeviceEvent], stream: torch.Stream | None = None) -> None:
        self._begin, self._end, self._stream = event(), event(), stream
        self._begin.record(stream)

    def stop(self) -> DeviceTimer:
        self._end.record(self._stream)
        return self

    def result(self) -> float:
        """Return the seconds. Raises what the device raises for what was launched."""
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1000


def timer_of(device: torch.device) -> Callable[[], Timer]:
    """Return what starts a timer for this device's work."""
    if device.type == "cpu":
        return HostTimer

    def start() -> DeviceTimer:
        # The stream of this thread and device, which need not be the current one.
        return DeviceTimer(lambda: torch.Event(device, enable_timing=True), torch.accelerator.current_stream(device))

    return start
