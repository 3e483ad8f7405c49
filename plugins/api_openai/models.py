"""/v1/models: what is served."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel

from pegboard.plugins.api_openai.surface import Surface
from pegboard.toolkit.http.answers import json_response
from pegboard.toolkit.http.model_names import root_of
from pegboard.toolkit.http.openapi import error_responses, json_answer


class ModelCard(BaseModel):
    """One model. `root` is where it came from, `parent` the model that it changes, and `max_model_len` how many tokens
    its context holds.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(BaseModel):
    """The answer of `/v1/models`: the served model under each of its names, the one that answers have first."""

    object: Literal["list"]
    data: list[ModelCard]


class Models:
    """The routes."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface

    def add_to(self, router: APIRouter) -> None:
        every, one = json_answer(ModelList), json_answer(ModelCard)
        router.get("/v1/models", summary="The models that are served", responses=every)(self.every)
        router.get("/v1/models/{model:path}", summary="One model", responses={**one, **error_responses(404)})(self.one)

    async def every(self) -> Response:
        return json_response({"object": "list", "data": [self._card(name) for name in self._surface.client.info.names]})

    async def one(self, model: str) -> Response:
        self._surface.check_model(model)
        info = self._surface.client.info
        return json_response(self._card(model if model in info.names else info.served_name))

    def _card(self, name: str) -> dict[str, Any]:
        client = self._surface.client
        info, root = client.info, root_of(client.services, name)
        return {
            "id": name,
            "object": "model",
            "created": info.created,
            "owned_by": "pegboard",
            "root": root or info.path,
            "parent": info.served_name if root else None,
            "max_model_len": info.max_context_len,
        }
