"""Ranks: several processes compute one model together, under one scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.contract import Cardinality, Contract
from pegboard.core.interfaces.plugin import Plugin, Provider

if TYPE_CHECKING:
    from pegboard.plugins.parallel.api import Communicator, CommunicatorContext, LaunchContext, RankLauncher

_HERE = "pegboard.plugins.parallel"

COMMUNICATOR: Contract[Communicator, CommunicatorContext] = Contract(
    "communicator",
    "parallel.communicator",
    Cardinality.MATCHED,
    f"{_HERE}.api:Communicator",
    "what the ranks of a model compute together",
    suite=f"{_HERE}.suite.communicator:CommunicatorContract",
    capabilities={
        "machines": "ranks may be on several machines",
        "shared_memory": "it has memory that all ranks map, for native code",
    },
    optional=True,
)

RANK_LAUNCHER: Contract[RankLauncher, LaunchContext] = Contract(
    "rank_launcher",
    "parallel.launch",
    Cardinality.MATCHED,
    f"{_HERE}.api:RankLauncher",
    "starts the ranks of a model",
    suite=f"{_HERE}.suite.launcher:RankLauncherContract",
    capabilities={"machines": "it starts ranks on other machines, which connect to this one by TCP"},
    optional=True,
)

plugin = Plugin(
    name="parallel",
    version="0.1.0",
    other_servers="pegboard.plugins.parallel:other_servers.yaml",
    summary="several processes compute one model together: tensor and pipeline parallel",
    contracts=(COMMUNICATOR, RANK_LAUNCHER),
    hooks=(f"{_HERE}.hooks:RanksHooks",),
    fields={"": f"{_HERE}.options:ParallelFields"},
    providers=(
        Provider(
            "communicator",
            "shm",
            f"{_HERE}.shm:Shm",
            "memory that all ranks on this machine map (x86, Linux)",
            provides=frozenset({"shared_memory"}),
            rank=20,
        ),
        Provider(
            "communicator",
            "gloo",
            f"{_HERE}.gloo:Gloo",
            "torch's gloo, over TCP",
            provides=frozenset({"machines"}),
            rank=10,
        ),
        Provider("rank_launcher", "torchrun", f"{_HERE}.torchrun:Torchrun", "torchrun, on this machine", rank=20),
        Provider("rank_launcher", "processes", f"{_HERE}.processes:Processes", "processes of this server", rank=10),
    ),
)
