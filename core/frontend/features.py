"""Features: the halves of stages in the process that takes requests."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from pegboard.core.interfaces.client import SAMPLING_FIELDS, STAGE_FIELDS, EmbedRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.frontend import FrontendStage, Price
from pegboard.toolkit.system.blame import in_words
from pegboard.toolkit.system.taking_part import takes_part

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import GenerateRequest, ModelInfo, OutputChunk
    from pegboard.core.interfaces.frontend import PromptExpander
    from pegboard.core.interfaces.messages import TokenizedRequest, TokenOutput
    from pegboard.core.interfaces.sampling import SamplingParams
    from pegboard.core.interfaces.stops import CompiledStops

logger = logging.getLogger(__name__)

FREE = Price()


class Features:
    """The frontend stages of one process. `origins` says which plugin brought each, by its name."""

    def __init__(self, stages: Sequence[FrontendStage] = (), origins: Mapping[str, str] | None = None) -> None:
        names = [stage.name for stage in stages]
        if len(set(names)) < len(names) or not all(names):
            raise ValueError(f"frontend stages must have names of their own: {', '.join(names)}")
        self._origins = origins or {}
        self._by_name = {stage.name: stage for stage in stages}
        self._served = frozenset(field for stage in stages for field in stage.fields)
        self._preparing = _at(stages, "prepare")
        self._stopping = _at(stages, "compile_stops")
        self._pricing = {stage.name for stage in _at(stages, "price")}
        self._expanding = _at(stages, "expander")
        self._serving = _at(stages, "service")

    def expanders(self, info: ModelInfo) -> dict[str, PromptExpander]:
        """Return what stages do with the prompts of an engine, by their names."""
        found = {stage.name: stage.expander(info) for stage in self._expanding}
        return {name: expander for name, expander in found.items() if expander is not None}

    def services(self, info: ModelInfo) -> dict[str, object]:
        """Return what stages offer APIs, by their names."""
        found = {stage.name: stage.service(info) for stage in self._serving}
        return {name: service for name, service in found.items() if service is not None}

    def figures(self, info: ModelInfo) -> dict[str, Mapping[str, object]]:
        """Return the figures of stages that have some, by their names."""
        found = {name: stage.figures(info) for name, stage in self._by_name.items()}
        return {name: figures for name, figures in found.items() if figures}

    def max_body_bytes(self, info: ModelInfo, most: int) -> int:
        """Return the largest body of a request in bytes, `most` or what a stage allows beyond that."""
        return max((most, *(stage.max_body_bytes(info) for stage in self._by_name.values())))

    def close(self) -> None:
        """End what stages have under way. May be called twice."""
        for stage in self._by_name.values():
            stage.close()

    def prepare(self, request: GenerateRequest | EmbedRequest, message: TokenizedRequest, info: ModelInfo) -> None:
        """Put into a message what stages are to know. Raises InvalidRequest, also for a field that no stage serves."""
        length = len(message.prompt) // 4
        for stage in self._preparing:
            with self._told(stage.name):
                found = stage.prepare(request, length, info)
                if found is not None:
                    message.features[stage.name] = msgspec.Raw(msgspec.msgpack.encode(found))
        if isinstance(request, EmbedRequest):
            if not message.features:
                raise not_served("embeddings")
            return
        for asked, fields in ((request, STAGE_FIELDS), (request.sampling, SAMPLING_FIELDS)):
            for field, default in fields.items():
                if (value := getattr(asked, field)) != default and field not in self._served:
                    raise not_served(getattr(value, "kind", field))

    def spelt(self, sampling: SamplingParams) -> tuple[object, ...]:
        """Return what stages compile of these parameters, as it came; nothing where it asks for nothing."""
        if not self._stopping:
            return ()
        found = ((getattr(sampling, field), default) for field, default in SAMPLING_FIELDS.items())
        return tuple(value for value, default in found if value != default)

    def compile_stops(self, sampling: SamplingParams) -> tuple[CompiledStops, ...]:
        """Return what stages bring to end an output by its text. Raises InvalidRequest."""
        found = []
        for stage in self._stopping:
            with self._told(stage.name):
                found.append(stage.compile_stops(sampling))
        return tuple(stops for stops in found if stops is not None)

    def price(self, message: TokenizedRequest, info: ModelInfo) -> Price:
        """Return what stages say that an answer will cost."""
        if not message.features:
            return FREE
        entries = numbers = per_token = chars = 0
        stops: tuple[CompiledStops, ...] = ()
        for name, feature in message.features.items():
            if name in self._pricing:
                found = self._by_name[name].price(feature, message, info)
                entries, numbers, chars = entries + found.entries, numbers + found.numbers, chars + found.chars
                per_token, stops = per_token + found.numbers_per_token, stops + found.stops
        return Price(entries, numbers, per_token, stops, chars)

    def finish(self, chunk: OutputChunk, output: TokenOutput) -> None:
        """Put into a chunk what stages have sent with an output. Raises InvalidRequest for one that raises."""
        whole, rows = output.features or {}, output.rows or {}
        for name in {**whole, **rows}:
            stage = self._by_name.get(name)
            if stage is not None:
                try:
                    stage.finish(chunk, whole.get(name), rows.get(name, ()))
                except Exception as error:
                    raise self._failed(name, error) from error

    def unread(self, error: Exception) -> InvalidRequest:
        """Return what an answer ends with whose text the stages could not read."""
        return self._failed(" or ".join(stage.name for stage in self._stopping), error)

    @contextlib.contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Around a call of a stage that may raise InvalidRequest: raise that, and anything else as its failure."""
        try:
            yield
        except InvalidRequest:
            raise
        except Exception as error:
            raise self._failed(name, error) from error

    def _failed(self, name: str, error: Exception) -> InvalidRequest:
        origin = self._origins.get(name)
        who = f"the stage {name!r} ({origin})" if origin else f"the stage {name!r}"
        logger.error("%s failed", who, exc_info=error)
        return InvalidRequest(f"{who} failed: {in_words(error)}", code="plugin_failed", status=500)


def not_served(param: str) -> InvalidRequest:
    """Return the refusal of what no stage of this server serves."""
    return InvalidRequest(f"{param}: no plugin of this server serves it", param=param, code="not_available")


def _at(stages: Sequence[FrontendStage], point: str) -> tuple[FrontendStage, ...]:
    return tuple(one for one in stages if takes_part(FrontendStage, one, point))
