"""In the process that takes requests: fields of requests checked and priced, and what was computed put into answers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from pegboard.core.interfaces.client import EmbedRequest, GenerateRequest, ModelInfo, OutputChunk
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.frontend import FrontendStage, Price
from pegboard.core.interfaces.messages import TokenizedRequest
from pegboard.plugins.row_outputs.messages import NAME, Asked, Said


class RowFrontend(FrontendStage):
    name = NAME
    fields = ("logprob_start", "return_hidden_states")

    def prepare(self, request: GenerateRequest | EmbedRequest, length: int, info: ModelInfo) -> Asked | None:
        if isinstance(request, EmbedRequest):
            _check(info, "embeddings", "embeddings", "runner.use must be a runner with hidden_states")
            return Asked(embed=True)
        if request.return_hidden_states:
            _check(info, "hidden_states", "return_hidden_states", "set model.hidden_states in its config")
        start = request.logprob_start
        if start is None and not request.return_hidden_states:
            return None
        if start is not None:
            if request.logprobs is None:
                raise InvalidRequest("logprob_start is for requests that want logprobs", param="logprob_start")
            if not 0 <= start < length:
                raise InvalidRequest(
                    f"logprob_start must be from 0 to {length - 1}, the prompt's last token, got {start}",
                    param="logprob_start",
                )
            _check(info, "input_logprobs", "logprob_start", "runner.use must be a runner with input_logprobs")
        return Asked(start, request.return_hidden_states)

    def price(self, feature: msgspec.Raw, message: TokenizedRequest, info: ModelInfo) -> Price:
        asked = msgspec.msgpack.decode(feature, type=Asked)
        entries, width = 0, info.hidden_size
        if asked.logprob_start is not None:
            per_token = 1 + (message.logprobs or 0) + len(message.token_ids_logprob)
            entries = (len(message.prompt) // 4 - asked.logprob_start) * per_token
        return Price(entries, width if asked.embed else 0, width if asked.hidden_states else 0)

    def finish(self, chunk: OutputChunk, whole: msgspec.Raw | None, rows: Sequence[msgspec.Raw]) -> None:
        if whole is not None:
            said = msgspec.msgpack.decode(whole, type=Said)
            chunk.input_logprobs = said.prompt
            if said.vector:
                chunk.vector = np.frombuffer(said.vector, "<f4").tolist()
        if rows:
            states = (msgspec.msgpack.decode(row, type=bytes) for row in rows)
            chunk.hidden_states = [np.frombuffer(state, "<f4").tolist() for state in states]


def _check(info: ModelInfo, feature: str, param: str, remedy: str) -> None:
    if feature not in info.features:
        raise InvalidRequest(f"{param}: this server does not have it; {remedy}", param=param, code="not_available")
