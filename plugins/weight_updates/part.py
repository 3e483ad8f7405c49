"""Where batches run: new weights are checked in a thread, and written some at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pegboard.core.interfaces.errors import ConfigError, ModelError, Problem, Unsupported
from pegboard.core.interfaces.stage import DevicePart
from pegboard.plugins.weight_updates.messages import (
    NAME,
    Announced,
    Check,
    Checked,
    Forget,
    Join,
    Joining,
    Leave,
    Meeting,
    Numbers,
    Poll,
    Read,
    Release,
    Write,
    Written,
)
from pegboard.plugins.weight_updates.source import FileSource, MemorySource, Source, check, of_directory
from pegboard.plugins.weight_updates.trainer_group import GroupSource, TrainerGroup
from pegboard.toolkit.system.blame import in_words
from pegboard.toolkit.system.memory import trim

if TYPE_CHECKING:
    from pegboard.core.interfaces.ahead import DeviceServices, LoadedModel
    from pegboard.core.interfaces.weights import WeightStore

logger = logging.getLogger(__name__)

_PAUSE = 0.001
"""Seconds after which a tensor that has not come is looked for again."""


class WeightPart(DevicePart):
    """Reads directories below `roots`, and files in `scratch`, for a model with this config."""

    name = NAME

    def __init__(
        self, roots: Sequence[Path], scratch: Path, hf_config: Mapping[str, object], group_timeout: float
    ) -> None:
        self._roots = [one.resolve() for one in roots]
        self._scratch = scratch.resolve()
        self._hf_config = hf_config
        self._group_timeout = group_timeout
        self._store: WeightStore
        self._device: torch.device
        self._checked = Checked(done=True)
        self._source: Source | None = None
        self._left: list[str] = []
        self._begun = False
        self._joined = Checked(done=True)
        self._groups: dict[str, TrainerGroup] = {}

    def attach(self, model: LoadedModel) -> None:
        """Take the weights. Raises ConfigError where the model does not lend them."""
        try:
            self._store, self._device = model.weights(), model.device
        except Unsupported as error:
            raise ConfigError(Problem("weight_updates.enabled", f"weights cannot be replaced: {error}")) from error

    def run(self, payload: object, services: DeviceServices) -> object:
        if isinstance(payload, Check):
            self._checked, self._begun = Checked(done=False), False
            threading.Thread(target=self._check, args=(payload,), name=NAME, daemon=True).start()
        elif isinstance(payload, Join):
            self._joined = Checked(done=False)
            threading.Thread(target=self._join, args=(payload.meeting,), name=NAME, daemon=True).start()
        elif isinstance(payload, Joining):
            return self._joined
        elif isinstance(payload, Leave):
            return self._leave(payload.group)
        elif isinstance(payload, Poll):
            return self._checked
        elif isinstance(payload, Write):
            return self._write(payload.seconds)
        elif isinstance(payload, Read):
            spec = self._store.expected()[payload.name]
            values = self._store.read(payload.name, payload.most).float().tolist()
            return Numbers(values, spec.shape, str(spec.dtype).removeprefix("torch."))
        elif isinstance(payload, Release):
            return self._release(payload, services)
        else:
            assert isinstance(payload, Forget)
            if self._source is not None:
                self._source.close()
            self._groups = {name: group for name, group in self._groups.items() if not group.closed}
            self._source, self._left = None, []
            trim()
        return True

    def _check(self, order: Check) -> None:
        try:
            self._source = source = self._opened(order)
            if order.origin is not None and source.origin != order.origin:
                raise ModelError(f"the files in {order.directory} are not those that the weights came from")
            self._left = check(source, self._store, partial=order.partial)
            source.wait()
            self._checked = Checked(done=True, tensors=len(self._left), origin=source.origin)
        except (ModelError, OSError) as error:
            self._checked = Checked(done=True, error=str(error))
        except Exception as error:
            logger.exception("new weights could not be checked")
            self._checked = Checked(done=True, error=f"the weights cannot be checked: {in_words(error)}")

    def _opened(self, order: Check) -> Source:
        if order.tensors is not None:
            return MemorySource(order.tensors)
        if order.announced is not None:
            return self._announced(order.announced)
        if order.file:
            file = Path(order.file).resolve()
            if not file.is_relative_to(self._scratch):
                raise ModelError(f"{order.file} is not a file of this server")
            return FileSource({file: []})
        directory = Path(order.directory).resolve()
        if not any(directory.is_relative_to(root) for root in self._roots):
            raise ModelError(f"{order.directory} is not below weight_updates.directories")
        return of_directory(directory, self._hf_config)

    def _announced(self, announced: Announced) -> Source:
        group = self._groups.get(announced.group)
        if group is None:
            raise ModelError(f"there is no group {announced.group!r:.100}; /init_weights_update_group makes one")
        try:
            most = max(torch.Size(spec.shape).numel() for spec in self._store.expected().values())
            return GroupSource(group, announced, most, self._group_timeout)
        except ModelError:
            # The trainer broadcasts what was refused.
            self._leave(group.name)
            raise

    def _join(self, meeting: Meeting) -> None:
        try:
            if meeting.name in self._groups:
                raise ModelError(f"there is a group {meeting.name!r} already; /destroy_weights_update_group ends it")
            self._groups[meeting.name] = TrainerGroup(meeting, self._device, self._group_timeout)
            self._joined = Checked(done=True)
        except ModelError as error:
            self._joined = Checked(done=True, error=str(error))
        except Exception as error:
            logger.exception("the ranks of a trainer's group did not meet")
            self._joined = Checked(done=True, error=f"the ranks did not meet: {in_words(error)}")

    def _leave(self, name: str) -> bool:
        group = self._groups.pop(name, None)
        if group is not None:
            group.close()
        return group is not None

    def _write(self, seconds: float) -> Written:
        source, end = self._source, time.monotonic() + seconds
        assert source is not None, "nothing was checked"
        try:
            if not self._begun:
                if changed := source.changed():
                    return Written(error=f"{changed}; nothing was written", begun=False)
                self._begun = True
                self._store.begin(self._left)
            while self._left:
                name = self._left[0]
                tensor = source.read(name, self._store.memory_of(name))
                if tensor is not None:
                    self._store.put(name, tensor)
                    self._left.pop(0)
                if time.monotonic() >= end:
                    return Written()
                if tensor is None:
                    time.sleep(_PAUSE)
            if not source.through():
                time.sleep(_PAUSE)
                return Written()
            if changed := source.changed():
                return Written(error=changed)
            self._store.finish()
        except Exception as error:
            logger.exception("new weights could not be written")
            return Written(error=in_words(error))
        return Written(done=True)

    def _release(self, order: Release, services: DeviceServices) -> dict[str, int]:
        found = {}
        if "kv_cache" in order.tags:
            found["kv_cache"] = services.pool.release()
        if "weights" in order.tags:
            found["weights"] = self._store.release()
        trim()
        return found
