"""Control actions: replace weights, look at them, give memory back and take it again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeGuard, TypeVar, get_args

from msgspec import Meta, ValidationError, convert

from pegboard.core.interfaces.engine_view import PauseMode
from pegboard.core.interfaces.errors import InvalidRequest, Unsupported
from pegboard.plugins.weight_updates.messages import (
    ASK_AGAIN,
    TAGS,
    Announced,
    Check,
    Checked,
    Join,
    Joining,
    Leave,
    Meeting,
    Numbers,
    Origin,
    Read,
    Release,
    Tag,
)
from pegboard.plugins.weight_updates.source import origin_of
from pegboard.plugins.weight_updates.update import Order, Update
from pegboard.toolkit.http.weight_version import BROKEN
from pegboard.toolkit.system.blame import in_words

if TYPE_CHECKING:
    import torch

    from pegboard.core.interfaces.engine_view import EngineView, Later
    from pegboard.plugins.weight_updates.stage import WeightUpdates

logger = logging.getLogger(__name__)

T = TypeVar("T", str, bool, int)
MODES: tuple[PauseMode, ...] = get_args(PauseMode)
MAX_VERSION = 256
NotNegative = Annotated[int, Meta(ge=0)]
MEMORY = "memory"
"""By which memory that was given back keeps the scheduler paused."""
_MOST_NUMBERS = 100_000


class Controls:
    """The actions `update_weights`, `get_weights_by_name`, `release_memory` and `resume_memory`; those that join and
    leave trainers' groups, if `groups` are allowed. `directory` has the weights of the start.
    """

    def __init__(self, stage: WeightUpdates, directory: str, *, groups: bool) -> None:
        self._stage = stage
        self._allowed = groups
        self._view: EngineView
        self._last = origin_of(Path(directory))
        """Where the weights of now can be read again; None: nowhere."""
        self._released: set[Tag] = set()
        self._busy = False
        self._used = ""
        """The group that an update, or a meeting, that is under way has to do with."""

    def add_to(self, engine: EngineView) -> None:
        self._view = engine
        engine.add_control("update_weights", self.update)
        engine.add_control("get_weights_by_name", self.read)
        engine.add_control("release_memory", self.release)
        engine.add_control("resume_memory", self.resume)
        engine.add_control("init_weights_group", self.join)
        engine.add_control("destroy_weights_group", self.leave)

    # ---- weights ---------------------------------------------------------------------------------------------------

    def update(self, args: dict[str, object]) -> Later:
        """Replace weights by those of a `path`, of a `file` of the API's process, by `tensors` by name (in process), or
        by those that the trainer of a `group` broadcasts: `announced`, a list of name, type and shape.

        `mode` says what becomes of the requests that are there (see `EngineView.pause`): `retract` by default, so that
        they are computed again with the new weights and go on. Without `partial` all tensors must be there, and in any
        case where the weights of now have no meaning, or are not there. A group whose trainer is refused is left.
        """
        try:
            self._check_free()
            order = self._ordered(args)
        except InvalidRequest:
            # The trainer broadcasts what was refused.
            if (group := args.get("group")) and isinstance(group, str) and group != self._used:
                self._stage.ask(Leave(group))
            raise
        return self._begun(order, _of(args, "group", ""))

    def _ordered(self, args: dict[str, object]) -> Order:
        path, file, partial = _of(args, "path", ""), _of(args, "file", ""), _of(args, "partial", False)
        tensors = args.get("tensors")
        if tensors is not None and not _are_tensors(tensors):
            raise InvalidRequest("tensors must map names to tensors", param="tensors")
        group = _of(args, "group", "")
        if sum((bool(path), bool(file), tensors is not None, bool(group))) != 1:
            raise InvalidRequest("exactly one of path, file, tensors and group is needed", param="path")
        announced = Announced(group, tensors_of(args)) if group else None
        mode = args.get("mode") or "retract"
        if not _is_mode(mode):
            raise InvalidRequest(f"mode must be one of {', '.join(MODES)}, got {mode!r:.100}", param="mode")
        if mode == "in_place" and self._view.prefix_cache.origins:
            text = "in_place does not work with a prefix cache that keeps prefixes beyond the device: what is computed "
            text += "with the new weights would be kept as if with those of before; use retract"
            raise InvalidRequest(text, param="mode")
        whole = self._why_whole() if partial else ""
        return Order(Check(path, file, tensors, announced, partial and not whole), mode, self._version(args), whole)

    def _begun(self, order: Order, group: str = "") -> Update:
        def then(origin: Origin | None) -> None:
            self._last = None if order.check.partial else origin
            self._taken_again("weights")

        made = Update(self._stage, self._view, order, then, self._over)
        self._busy, self._used = True, group
        return made

    def _over(self) -> None:
        self._busy, self._used = False, ""

    def _why_whole(self) -> str:
        """Return why an update must bring all weights; "": it need not."""
        if "weights" in self._released:
            return "their memory was given back"
        return "an update has failed" if self._stage.broken else ""

    def _version(self, args: dict[str, object]) -> str:
        """Return the version that the weights will have: what is said, or a number."""
        found = _of(args, "weight_version", "") or str(self._stage.updates + 1)
        if len(found) > MAX_VERSION:
            raise InvalidRequest(f"weight_version has at most {MAX_VERSION} characters", param="weight_version")
        return found

    def _check_free(self) -> None:
        if self._busy:
            text = "an update of the weights is under way, or the meeting of a group"
            raise InvalidRequest(text, code="update_under_way", status=409)

    def read(self, args: dict[str, object]) -> dict[str, object]:
        """Return the first numbers of the tensor `name`, `truncate_size` at most."""
        self._check_free()
        name, most = _of(args, "name", ""), _of(args, "truncate_size", 100)
        if not 0 < most <= _MOST_NUMBERS:
            raise InvalidRequest(f"truncate_size must be from 1 to {_MOST_NUMBERS}", param="truncate_size")
        if self._stage.broken or "weights" in self._released:
            raise InvalidRequest("there are no weights now", code="no_weights", status=409)
        try:
            found = self._stage.ask(Read(name, most))
        except KeyError:
            raise InvalidRequest(f"there is no tensor {name!r:.300}", param="name", status=404) from None
        except Unsupported as error:
            raise InvalidRequest(str(error), param="name") from None
        assert isinstance(found, Numbers)
        return {"values": found.values, "shape": list(found.shape), "dtype": found.dtype}

    # ---- a trainer's groups ----------------------------------------------------------------------------------------

    def join(self, args: dict[str, object]) -> Later:
        """Meet the other ranks of the group `name` at `address` and `port`, as `rank` of `size`, with a `backend`."""
        self._check_groups()
        meeting = Meeting(
            _of(args, "name", ""),
            _of(args, "address", ""),
            _of(args, "port", 0),
            _of(args, "rank", 0),
            _of(args, "size", 0),
            _of(args, "backend", "auto"),
        )
        if not 0 < meeting.rank < meeting.size:
            text = (
                f"rank_offset must be from 1 (0 is the trainer) to world_size - 1, got {meeting.rank} of {meeting.size}"
            )
            raise InvalidRequest(text, param="rank_offset")
        self._stage.ask(Join(meeting))
        self._busy, self._used = True, meeting.name
        return Meets(self._stage, self._over)

    def leave(self, args: dict[str, object]) -> dict[str, object]:
        """Leave the group `name`."""
        self._check_groups()
        if not self._stage.ask(Leave(_of(args, "name", ""))):
            raise InvalidRequest(f"there is no group {args.get('name')!r:.100}", param="group_name", status=404)
        return {}

    def _check_groups(self) -> None:
        if not self._allowed:
            raise InvalidRequest("process groups are off (weight_updates.process_groups)", code="unsupported")
        self._check_free()

    # ---- memory ----------------------------------------------------------------------------------------------------

    def release(self, args: dict[str, object]) -> dict[str, object]:
        """Give the memory of `tags` back; by default that of KV and of the weights. Requests wait until it is there
        again.
        """
        self._check_free()
        tags = tuple(tag for tag in _tags(args) if tag not in self._released)
        stats = self._view.stats()
        if used := stats["running_requests"] or stats["held_tokens"] or stats["locked_tokens"]:
            text = f"{stats['running_requests']} requests run, or memory is kept for them ({used}); "
            text += "wait, or pause generation with the mode retract"
            raise InvalidRequest(text, code="busy", status=409)
        self._view.pause("in_place", MEMORY)
        self._view.settle()
        try:
            if "kv_cache" in tags:
                # First, so that nothing is found of what was given back where that fails half-way.
                self._stage.forget_prefixes()
                self._view.drop_prefixes()
            return {"released_bytes": self._given_back(tags)}
        finally:
            if not self._released:
                self._view.resume(MEMORY)

    def _given_back(self, tags: tuple[Tag, ...]) -> dict[str, int]:
        """Have memory given back. Where that fails, what was in it has no meaning any more, and counts as given
        back.
        """
        try:
            found = self._stage.ask(Release(tags))
        except Unsupported as error:
            raise InvalidRequest(f"memory cannot be given back: {error}", param="tags") from None
        except Exception as error:
            logger.exception("memory could not be given back")
            self._released.update(tags)
            text = f"giving memory back has failed, take it again ({', '.join(tags)})"
            if "weights" in tags:
                self._stage.broke(in_words(error), text)
            code = BROKEN if "weights" in tags else "release_failed"
            raise InvalidRequest(f"{text}: {in_words(error)}", code=code, status=500) from error
        self._released.update(tags)
        assert isinstance(found, dict)
        return found

    def resume(self, args: dict[str, object]) -> dict[str, object] | Later:
        """Take the memory of `tags` again. Weights are read from where they came from; if they came as tensors, or the
        files are not the same any more, they wait for an update.
        """
        self._check_free()
        tags = _tags(args)
        if "kv_cache" in tags:
            self._taken_again("kv_cache")
        if "weights" not in tags or "weights" not in self._released:
            return {}
        origin = self._last
        if origin is None or origin_of(Path(origin.directory)) != origin:
            return {"waits_for": "update_weights"}
        return self._begun(Order(Check(origin.directory, origin=origin), "retract", self._stage.version))

    def _taken_again(self, tag: Tag) -> None:
        self._released.discard(tag)
        if not self._released:
            self._view.resume(MEMORY)


class Meets:
    """Answers once the ranks of a group have met. `over` is called in any case."""

    def __init__(self, stage: WeightUpdates, over: Callable[[], None]) -> None:
        self._stage = stage
        self._over = over
        self._next = 0.0

    def poll(self) -> dict[str, object] | None:
        if time.monotonic() < self._next:
            return None
        # Asking waits for the step under way.
        self._next = time.monotonic() + ASK_AGAIN
        try:
            found = self._stage.ask(Joining())
        except BaseException:
            self._over()
            raise
        assert isinstance(found, Checked)
        if not found.done:
            return None
        self._over()
        if found.error:
            raise InvalidRequest(found.error, param="master_address")
        return {}


def tensors_of(args: dict[str, object]) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Return what a trainer announces. Raises InvalidRequest."""
    try:
        return tuple(convert(args.get("announced"), list[tuple[str, str, tuple[NotNegative, ...]]]))
    except ValidationError as error:
        text = f"each tensor that is announced needs a name, type and shape: {error}"
        raise InvalidRequest(text, param="announced") from None


def _tags(args: dict[str, object]) -> tuple[Tag, ...]:
    tags = args.get("tags")
    if tags is None:
        return TAGS
    if not isinstance(tags, list) or not all(tag in TAGS for tag in tags):
        raise InvalidRequest(f"tags must be a list of {' and '.join(TAGS)}, got {tags!r:.100}", param="tags")
    return tuple(tag for tag in TAGS if tag in tags)


def _of(args: dict[str, object], name: str, otherwise: T) -> T:
    value = args.get(name)
    if value is None:
        return otherwise
    if type(value) is not type(otherwise):
        raise InvalidRequest(f"{name} must be {type(otherwise).__name__}, got {value!r:.100}", param=name)
    return value


def _is_mode(mode: object) -> TypeGuard[PauseMode]:
    return mode in MODES


def _are_tensors(found: object) -> TypeGuard[Mapping[str, torch.Tensor]]:
    import torch

    return isinstance(found, Mapping) and all(
        isinstance(name, str) and isinstance(one, torch.Tensor) for name, one in found.items()
    )
