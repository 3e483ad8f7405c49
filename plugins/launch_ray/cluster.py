"""The Ray cluster of a server: one that is there, or one of this machine that is started for this process alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import ray

from pegboard.core.interfaces.errors import PegboardError, Temporary

_PREFIX = "pegboard-ray-"
_ROOTS = (Path(tempfile.gettempdir()), Path("/tmp"))
_REACH_SECONDS = 10.0
_LONGEST = 20
"""Characters of the root of Ray's folder: the paths of sockets in it may have 107, and most of them are Ray's."""


class Cluster:
    """This process is the driver of one job, until `leave`. Where the cluster was started for it, that ends, too."""

    def __init__(self, address: str | None, cpus: int) -> None:
        """Join the cluster at this address; None: start one with so many CPUs. Raises PegboardError, of which Temporary
        says that the cluster is not up.
        """
        if ray.is_initialized():
            # Its actors and objects would end with this job.
            raise PegboardError("this process is in a session of Ray already; start the engine in a process of its own")
        self._folder: Path | None = None
        try:
            with _signals_kept():
                self._join(address, cpus)
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            self.leave()
            what = "a Ray cluster cannot be started" if address is None else f"the Ray cluster {address!r} is not there"
            # An address that cannot be one stays so; a cluster may come up.
            kind = PegboardError if address is None or isinstance(error, ValueError) else Temporary
            raise kind(f"{what}: {' '.join(str(error).split())}") from error

    def _join(self, address: str | None, cpus: int) -> None:
        if address is not None:
            _reach(address)
            ray.init(address, log_to_driver=False, configure_logging=False)
            return
        _remove_old_folders()
        # Ray would send statistics of a cluster that it starts to its authors.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        root = next((one for one in _ROOTS if len(str(one)) <= _LONGEST), _ROOTS[-1])
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
        ray.init(
            "local",
            num_cpus=cpus,
            num_gpus=0,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=str(self._folder),
        )

    def leave(self) -> None:
        """End this process's job. May be called again."""
        with _signals_kept():
            ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _reach(address: str) -> None:
    """Raise OSError where nothing listens there: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if host:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_SECONDS).close()


def _remove_old_folders() -> None:
    """Remove what clusters have left whose processes were killed."""
    for root in _ROOTS:
        for folder in root.glob(f"{_PREFIX}*-*"):
            pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
            with contextlib.suppress(OSError, ValueError):
                if folder.stat().st_uid == os.getuid() and not psutil.pid_exists(int(pid)):
                    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep what this process does at signals: Ray sets handlers of its own."""
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
