"""What API plugins need from a model that takes pictures and videos."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pegboard.toolkit.media.inputs import MediaKind


class MediaReader(Protocol):
    """The part of a media processor that concerns chats."""

    @property
    def kinds(self) -> Collection[MediaKind]:
        """What the model takes."""

    @property
    def reserved(self) -> Collection[str]:
        """Spellings of the tokens that mean media to the model. A user's text that spells one stays text."""

    def part(self, kind: MediaKind) -> Mapping[str, object]:
        """Return the content part that chat templates are given for an item."""


@dataclass(frozen=True, slots=True)
class MediaService:
    """What a FrontendStage offers API plugins (`EngineClient.services`). `figures` returns counters and gauges of
    preparing media, as plain values; it asks no scheduler.
    """

    reader: MediaReader
    figures: Callable[[], Mapping[str, object]]


class HasServices(Protocol):
    """An engine, or a client of one."""

    @property
    def services(self) -> Mapping[str, object]: ...


def service_of(engine: HasServices) -> MediaService | None:
    """Return what an engine offers about media; None for a model that takes none."""
    return next((one for one in engine.services.values() if isinstance(one, MediaService)), None)


def reader_of(engine: HasServices) -> MediaReader | None:
    """Return what knows the model's media; None for a model that takes none."""
    service = service_of(engine)
    return None if service is None else service.reader
