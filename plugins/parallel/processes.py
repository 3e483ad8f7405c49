"""The launcher `processes`: ranks are child processes of the scheduler's."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import PegboardError
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.parallel.api import LaunchContext, RankHandle, RankLauncher

if TYPE_CHECKING:
    from collections.abc import Callable

_KILL_SECONDS = 10


class _Process(RankHandle):
    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self.process = process
        self.connection = connection

    @property
    def pid(self) -> int:
        return self.process.pid

    def died(self, seconds: float) -> str | None:
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(_KILL_SECONDS)
        if self.process.stdin is not None:
            self.process.stdin.close()


class Processes(RankLauncher[NoOptions]):
    """Ranks on this machine, which share its cores evenly with this process."""

    def __init__(self, options: NoOptions, ctx: LaunchContext) -> None:
        super().__init__(options, ctx)
        self._before = set_threads(ctx.threads)

    @classmethod
    def supports(cls, options: NoOptions, ctx: LaunchContext) -> str | None:
        """Return None where each rank has a core."""
        return ctx.too_few_cores()

    def start(self, line: Callable[[int], bytes]) -> RankHandle:
        command = [sys.executable, "-m", self.ctx.module]
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.ctx.threads)}
        ours, theirs = socket.socketpair()
        file = theirs.fileno()
        with theirs:
            try:
                process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[file], env=environment)
            except OSError as error:
                ours.close()
                raise PegboardError(f"a rank cannot be started: {error}") from error
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: its socket says so
            process.stdin.write(line(file))
            process.stdin.flush()
        return _Process(process, ours)

    def close(self) -> None:
        set_threads(self._before)


def set_threads(count: int) -> int:
    """Have torch compute with so many threads. Return how many there were."""
    import torch

    before: int = torch.get_num_threads()
    torch.set_num_threads(count)
    return before
