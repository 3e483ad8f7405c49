"""The launcher `ray` keeps its contract, on two nodes: run by `make ray`."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from pegboard.plugins.launch_ray.options import RayOptions
from pegboard.plugins.parallel.api import LaunchContext, RankLauncher
from pegboard.plugins.parallel.suite.launcher import MODULE, RankLauncherContract
from tests.parallel.ray_cluster import OTHER, cluster

ray = pytest.importorskip("ray", reason="make ray installs it")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    with cluster(cpus=4) as made:
        yield made


class TestRay(RankLauncherContract):
    provider = "ray"

    @pytest.fixture(autouse=True)
    def _nodes(self, nodes: Any) -> None:
        self.address_of_ray = nodes.address

    @contextlib.contextmanager
    def launcher(self, size: int = 2) -> Iterator[RankLauncher]:
        where = {"address": self.address_of_ray, "resources": {OTHER: 1}}
        made: RankLauncher = self.build(LaunchContext(size, size, MODULE, machines=True), **where)
        try:
            yield made
        finally:
            made.close()

    def test_signals_are_as_they_were(self) -> None:
        before = signal.getsignal(signal.SIGTERM)
        with self.launcher():
            assert signal.getsignal(signal.SIGTERM) == before
        assert signal.getsignal(signal.SIGTERM) == before


def test_when_it_is_chosen() -> None:
    from pegboard.plugins.launch_ray.launcher import Ray

    assert Ray.supports(RayOptions(), LaunchContext(2, 2, "x", machines=True)) is None
    assert "2 ranks take a core each" in (Ray.supports(RayOptions(), LaunchContext(2, 1, "x", machines=True)) or "")
    assert Ray.supports(RayOptions(address="auto"), LaunchContext(2, 1, "x", machines=True)) is None
    assert "to gloo" in (Ray.supports(RayOptions(), LaunchContext(2, 2, "x")) or "")
