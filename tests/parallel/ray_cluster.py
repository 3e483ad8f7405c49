"""A Ray cluster of several nodes on this machine, for tests; it listens on the loopback interface."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

OTHER = "other"
"""A resource that only the second node has: ranks that need it are there."""
PATIENCE = 120.0


@contextlib.contextmanager
def cluster(cpus: int = 2) -> Iterator[Cluster]:
    """Yield a cluster of two nodes with so many CPUs each. Nothing of it is left afterwards."""
    from ray.cluster_utils import Cluster

    scratch = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets are in there, whose paths have to be short
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    head: dict[str, Any] = {"num_cpus": cpus, "include_dashboard": False}
    usual = os.environ.get("RAY_TMPDIR")
    os.environ["RAY_TMPDIR"] = str(scratch)
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        add_node(made, cpus)
        yield made
    finally:
        made.shutdown()
        del os.environ["RAY_TMPDIR"]
        if usual is not None:
            os.environ["RAY_TMPDIR"] = usual
        started = [one for one in psutil.Process().children(recursive=True) if one.pid not in before]
        _, left = psutil.wait_procs(started, PATIENCE)
        shutil.rmtree(scratch, ignore_errors=True)
    assert not left, f"{left} go on after the cluster's end"


def add_node(made: Cluster, cpus: int = 2) -> Any:
    """Add the second node, or another one in its place."""
    node = made.add_node(num_cpus=cpus, resources={OTHER: 4}, include_dashboard=False)
    made.wait_for_nodes()
    return node


def workers(name: str) -> list[psutil.Process]:
    """Return Ray's processes that run an actor of this class, on all nodes of this test."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            title = " ".join(process.cmdline()).partition(".")[0].rstrip()  # without the method that it runs
            if title == f"ray::{name}":
                found.append(process)
    return found
