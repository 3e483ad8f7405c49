"""A stage that has a process raise, or leave, in its next forward pass: whichever finds a file with its number."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from pegboard.core.interfaces.hooks import hookimpl
from pegboard.core.interfaces.stage import DevicePart, Interest, Stage
from pegboard_drills.options import RankDrillOptions

if TYPE_CHECKING:
    from pegboard.core.interfaces.batch import BatchExtras
    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.core.interfaces.messages import TokenizedRequest
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.stage import StepView

R = TypeVar("R")
NAME = "rank_drill"


class Nothing(msgspec.Struct, frozen=True):
    """The payload: the part is called for each batch."""


class RankDrillStage(Stage):
    name = NAME

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest:
        return Interest(look=False)

    def pack(self, step: StepView, extras: BatchExtras) -> Nothing:
        return Nothing()


class RankDrillPart(DevicePart):
    name = NAME
    payload = Nothing

    def __init__(self, directory: Path) -> None:
        self._file = directory / str(os.getpid())

    def execute(self, payload: object, batch: ForwardBatch, run: Callable[[], R]) -> R:
        if self._file.exists():
            if self._file.read_text() == "leave":
                os._exit(0)
            raise RuntimeError("a drill")
        return run()


class RankDrillHooks:
    def __init__(self, options: RankDrillOptions) -> None:
        self._directory = options.directory

    @hookimpl
    def pipeline_stages(self) -> list[Stage]:
        return [RankDrillStage()] if self._directory else []

    @hookimpl
    def device_parts(self) -> list[DevicePart]:
        return [RankDrillPart(Path(self._directory))] if self._directory else []
