"""What follows from the device that a model runs on: how steps follow each other, and which thread launches them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from pegboard.core.interfaces.ahead import DeviceServices
from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.interfaces.executor import Pending
from pegboard.core.interfaces.stage import DevicePart
from pegboard.core.pipeline.executor import Done, LocalExecutor
from pegboard.core.pipeline.unsampled import BLAME, Blame

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pegboard.core.engine.choose import Chosen
    from pegboard.core.interfaces.executor import Executor
    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.pipeline.executor import RunStage
    from pegboard.core.worker.worker import Worker


def device_of(name: str) -> torch.device:
    """Return the device that `model.device` names, made the current one. Raises ConfigError where it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"model.device: {name!r}, but torch {torch.__version__} finds no GPU here; use 'cpu' or 'auto'"
        )
    if device.index is not None:
        torch.cuda.set_device(device)  # Triton launches on the current device, whatever its arguments' device is
    return device


def loop_of(name: str, device: torch.device, lanes: int = 1) -> str:
    """Return the loop that a name in the config stands for: for auto, that of the device and of an executor's lanes."""
    if name != "auto":
        return name
    return "overlap" if device.type == "cuda" or lanes > 1 else "normal"


def executor_of(
    loop: str, worker: Worker, stages: Mapping[str, RunStage], device: torch.device, lanes: int = 1
) -> Executor:
    """Return what runs batches, and the work of `stages`. A GPU computes beside the host by itself, so that launches
    need no thread; on a CPU the overlap loop needs one, unless followers bring one for each of several `lanes`.
    """
    thread = loop == "overlap" and device.type != "cuda" and lanes == 1
    send_table = worker.batches.send_table
    return LocalExecutor(worker.launch, worker.rerun, worker.healthy, stages, send_table=send_table, thread=thread)


def stage_parts(chosen: Chosen, worker: Worker, pool: KVPool) -> dict[str, RunStage]:
    """Return what runs the work of stages, beside the worker's batches, with KV in `pool`."""
    working = [part for part in worker.parts.by_name.values() if type(part).run is not DevicePart.run]
    table, *further = worker.batches.tables
    services = DeviceServices(pool, table, tuple(further))
    parts: dict[str, RunStage] = {part.name: partial(_run, part, services) for part in working}
    parts[BLAME] = Blame(chosen.processors, chosen.spec.vocab_size).run
    return parts


@torch.inference_mode()
def _run(part: DevicePart, services: DeviceServices, payload: object) -> Pending[object]:
    found = part.run(payload, services)
    return found if isinstance(found, Pending) else Done(found)
