"""The launcher `ray`: each rank is a child process of an actor, and all actors are in one placement group.

The scheduler's process is Ray's driver. Its end is the end of its job, by which Ray ends the actors and removes the
placement group, and with an actor its rank ends. The control connections are TCP, and the actors get their keys from
Ray.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pegboard.core.interfaces.errors import PegboardError, Temporary
from pegboard.plugins.launch_ray.actor import RankActor
from pegboard.plugins.launch_ray.cluster import Cluster
from pegboard.plugins.launch_ray.options import RayOptions
from pegboard.plugins.parallel.api import LaunchContext, RankHandle, RankLauncher
from pegboard.toolkit.system.keyed_sockets import KeyedListener, new_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from ray import ObjectRef
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

R = TypeVar("R")
_ANSWER_SECONDS = 15.0
"""How long an actor may take to answer beyond the time that it was asked to wait."""
_AT_ONCE = 4
"""Calls that an actor serves at once: it is asked how its rank ends while it is told to end it."""


class Ray(RankLauncher[RayOptions]):
    """Starts ranks on the machines of a Ray cluster."""

    def __init__(self, options: RayOptions, ctx: LaunchContext) -> None:
        super().__init__(options, ctx)
        import torch

        self._threads = ctx.threads if options.cpus is None else options.cpus
        self._before = torch.get_num_threads()
        self._started = 0
        self._group: PlacementGroup | None = None
        self._listener: KeyedListener | None = None
        self._cluster = Cluster(options.address, (ctx.size - 1) * self._threads)
        try:
            self._group = self._reserve()
            self._listener = KeyedListener(ray.util.get_node_ip_address())
        except BaseException:
            self.close()
            raise
        self.address = self._listener.address
        torch.set_num_threads(self._threads)

    @classmethod
    def supports(cls, options: RayOptions, ctx: LaunchContext) -> str | None:
        """Return None where the communicator reaches other machines and, without a cluster, each rank has a core."""
        if not ctx.machines:
            return (
                "its ranks may be on other machines, which gloo reaches, without sections of layers; set "
                "parallel.communicator.use to gloo and parallel.pipeline to 1"
            )
        return ctx.too_few_cores() if options.address is None else None

    def _reserve(self) -> PlacementGroup:
        """Return room for all ranks but this one. Raises Temporary where the cluster has none in time."""
        ranks, bundle = self.ctx.size - 1, {"CPU": float(self._threads), **self.options.resources}
        group = placement_group([dict(bundle) for _ in range(ranks)], strategy=self.options.strategy)
        if not group.wait(self.options.timeout):
            remove_placement_group(group)
            raise Temporary(
                f"the Ray cluster has no room for {ranks} ranks with {bundle} each ({self.options.strategy}) within "
                f"{self.options.timeout:g} s; it has {_of_interest(ray.cluster_resources())}, of which "
                f"{_of_interest(ray.available_resources())} are free"
            )
        return group

    def start(self, line: Callable[[int], bytes]) -> RankHandle:
        assert self._group is not None
        assert self._listener is not None
        bundle = self._started % (self.ctx.size - 1)
        self._started += 1
        actor: ActorHandle = (
            ray.remote(RankActor)
            .options(
                num_cpus=self._threads,
                max_concurrency=_AT_ONCE,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
            )
            .remote()
        )
        key = new_key()
        coming = self._listener.expect(key)
        try:
            file, host = self._answer(actor.connect.remote(self._listener.address, key), tuple)
            connection = coming.result(_ANSWER_SECONDS)
        except BaseException:
            ray.kill(actor)
            if not coming.cancel() and coming.exception() is None:
                coming.result().close()
            raise
        try:
            pid = self._answer(actor.run.remote(self.ctx.module, line(file), self._threads), int)
        except BaseException:
            ray.kill(actor)
            connection.close()
            raise
        handle = _Rank(actor, pid, "" if host == self._listener.address[0] else host)
        handle.connection = connection
        return handle

    def _answer(self, asked: ObjectRef[R], kind: type[R]) -> R:
        """Return what an actor answers while it starts. Raises PegboardError."""
        try:
            answer = ray.get(asked, timeout=self.options.timeout)
        except GetTimeoutError:
            raise PegboardError(f"Ray has not started a rank within {self.options.timeout:g} s") from None
        except RayError as error:
            raise PegboardError(f"Ray cannot start a rank: {_said(error)}") from None
        assert isinstance(answer, kind)
        return answer

    def close(self) -> None:
        import torch

        if self._listener is not None:
            self._listener.close()
        if self._group is not None:
            with contextlib.suppress(RayError):  # the cluster is gone
                remove_placement_group(self._group)
            self._group = None
        self._cluster.leave()
        torch.set_num_threads(self._before)


class _Rank(RankHandle):
    """A rank, by the actor that runs it."""

    def __init__(self, actor: ActorHandle, pid: int, host: str) -> None:
        self.host = host
        self._actor = actor
        self._pid = pid
        self._how: str | None = None

    @property
    def pid(self) -> int:
        return self._pid

    def died(self, seconds: float) -> str | None:
        if self._how is None:
            self._ask(self._actor.died.remote(seconds), seconds)
        return self._how

    def kill(self) -> None:
        if self._how is None:
            self._ask(self._actor.kill.remote(), 0.0)
        ray.kill(self._actor)
        if self._how is None:
            raise PegboardError(f"process {self._pid} does not end, or its machine does not answer")

    def _ask(self, asked: ObjectRef[str | None], seconds: float) -> None:
        try:
            how = ray.get(asked, timeout=seconds + _ANSWER_SECONDS)
        except GetTimeoutError:
            return
        except RayError as error:
            how = f"ended with its actor: {_said(error)}"
        self._how = self._how or how


def _said(error: RayError) -> str:
    """Return what an error of Ray's says, on one line: of a task, what it raised."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return " ".join(str(cause).split()) or type(error).__name__


def _of_interest(resources: dict[str, float]) -> dict[str, float]:
    return {name: count for name, count in sorted(resources.items()) if name not in ("memory", "object_store_memory")}
