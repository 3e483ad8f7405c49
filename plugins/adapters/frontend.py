"""In the process that takes requests: which name of a model means an adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.frontend import FrontendStage
from pegboard.plugins.adapters.messages import NAME
from pegboard.plugins.adapters.options import MAX_NAME
from pegboard.toolkit.http.model_names import ADAPTER, AddedModels

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import EmbedRequest, GenerateRequest, ModelInfo, OutputChunk

_PARAM = f"params.{ADAPTER}"


class KnownAdapters(AddedModels):
    """The adapters that requests may name, with their directories, as the scheduler said last. `checked` says that APIs
    take no other names of models than those that are known.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self.checked = False
        self.names: Mapping[str, str] = {}
        self._ever: set[str] = set()
        self.learn(names)

    def learn(self, names: Mapping[str, str]) -> None:
        """Take what the scheduler says now."""
        self.names = dict(names)
        self._ever |= names.keys()

    def forget(self, name: str) -> None:
        """Take an adapter away whose files could not be read again."""
        self.names = {known: path for known, path in self.names.items() if known != name}

    def meant(self, model: str, info: ModelInfo) -> str | None:
        """Return the adapter that a request means by its `model`; None: the model itself. One that has been unloaded
        since it was checked is meant still, and without a check any name that is not the model's: the scheduler
        refuses what it does not know.
        """
        name = model.removeprefix(f"{info.served_name}:")
        if name in self._ever and model != info.served_name:
            return name
        return name if not self.checked and info.named(model) not in info.names else None

    def root_of(self, name: str) -> str | None:
        return self.names.get(name)


class AdapterFrontend(FrontendStage):
    """Takes ``params["adapter"]``, or else the model's name: that of an adapter, or `base:adapter`."""

    name = NAME

    def __init__(self, known: KnownAdapters) -> None:
        self._known = known

    def service(self, info: ModelInfo) -> KnownAdapters:
        self._known.learn(info.stages[NAME]["names"])
        return self._known

    def prepare(self, request: GenerateRequest | EmbedRequest, length: int, info: ModelInfo) -> str | None:
        said = request.params.get(ADAPTER)
        if said is not None:
            if not isinstance(said, str) or not 0 < len(said) <= MAX_NAME:
                raise InvalidRequest(f"{_PARAM} must be the name of an adapter", param=_PARAM)
            return said
        return self._known.meant(request.model, info)

    def finish(self, chunk: OutputChunk, whole: msgspec.Raw | None, rows: Sequence[msgspec.Raw]) -> None:
        if whole is not None:
            self._known.forget(msgspec.msgpack.decode(whole, type=str))
