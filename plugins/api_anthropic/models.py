"""/v1/models as Anthropic has it, for clients that say `anthropic-version`: the path belongs to OpenAI's, too."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_anthropic.answers import ModelCard, ModelPage
from pegboard.plugins.api_anthropic.errors import ErrorAnswer, write_error
from pegboard.toolkit.http.answers import json_response
from pegboard.toolkit.http.generation import check_model
from pegboard.toolkit.http.levels import USER
from pegboard.toolkit.http.openapi import error_responses, json_answer
from pegboard.toolkit.http.routing import api_router

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import EngineClient

HEADER = "anthropic-version"
PAGE, LARGEST_PAGE = 20, 1000


class Models:
    """The served model under each of its names."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def routes(self) -> APIRouter:
        router = api_router(errors=write_error, only_with=HEADER, tags=["anthropic"], dependencies=[USER])
        errors = error_responses(404, model=ErrorAnswer)
        router.get("/v1/models", summary="The models that are served", responses={**json_answer(ModelPage), **errors})(
            self.page
        )
        router.get("/v1/models/{model:path}", summary="One model", responses={**json_answer(ModelCard), **errors})(
            self.one
        )
        return router

    async def page(self, request: Request) -> Response:
        names, asked = list(self._client.info.names), request.query_params
        limit = _limit(asked.get("limit"))
        after, before = asked.get("after_id"), asked.get("before_id")
        if after is not None:
            names = names[_place(names, after, "after_id") + 1 :]
        if before is not None:
            names = names[: _place(names, before, "before_id")]
        if (wanted := asked.getlist("lifecycle") + asked.getlist("lifecycle[]")) and "active" not in wanted:
            names = []
        # A page that ends before a name is the one next to it.
        some = names[-limit:] if before is not None and after is None else names[:limit]
        ends = {"first_id": some[0] if some else None, "last_id": some[-1] if some else None}
        return json_response({"data": [self._card(name) for name in some], "has_more": len(some) < len(names), **ends})

    async def one(self, model: str) -> Response:
        info = self._client.info
        check_model(info, model)
        return json_response(self._card(model if model in info.names else info.served_name))

    def _card(self, name: str) -> dict[str, Any]:
        info = self._client.info
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": datetime.fromtimestamp(info.created, UTC).isoformat().replace("+00:00", "Z"),
            "lifecycle": "active",
            "max_input_tokens": info.max_context_len,
            "max_tokens": None,
        }


def _limit(said: str | None) -> int:
    if said is None:
        return PAGE
    if not (said.isascii() and said.isdigit() and len(said) < 5 and 1 <= int(said) <= LARGEST_PAGE):
        raise InvalidRequest(f"limit must be from 1 to {LARGEST_PAGE}", param="limit")
    return int(said)


def _place(names: list[str], name: str, param: str) -> int:
    if name not in names:
        raise InvalidRequest(f"{param}: there is no model {name[:200]!r}", param=param)
    return names.index(name)
