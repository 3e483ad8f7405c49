"""What follows from the device that a model runs on: how steps follow each other, and which thread launches them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.pipeline.executor import InlineExecutor, LaunchExecutor, ThreadExecutor, no_media

if TYPE_CHECKING:
    from pegboard.core.pipeline.executor import Executor
    from pegboard.core.pipeline.worker import Worker


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


def loop_of(name: str, device: torch.device) -> str:
    """Return the loop that a name in the config stands for: for auto, that of the device."""
    if name != "auto":
        return name
    return "overlap" if device.type == "cuda" else "normal"


def executor_of(loop: str, worker: Worker, device: torch.device) -> Executor:
    """Return what runs batches. A GPU computes beside the host by itself, so that launches need no thread; on a CPU the
    overlap loop needs one.
    """
    encode = no_media if worker.media is None else worker.media.encode
    parts = worker.again, worker.healthy, encode, worker.draft
    if loop != "overlap":
        return InlineExecutor(worker.run, *parts)
    return LaunchExecutor(worker.launch, *parts) if device.type == "cuda" else ThreadExecutor(worker.launch, *parts)
