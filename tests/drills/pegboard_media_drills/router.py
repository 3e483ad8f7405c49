"""/media: pictures in, tokens out."""

from __future__ import annotations

import contextlib

import fastapi
from fastapi import Request, Response

from pegboard.core.interfaces.api_router import ApiRouter
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.toolkit.http.answers import json_response
from pegboard.toolkit.http.bodies import RequestModel, parse_body
from pegboard.toolkit.http.events import until_disconnect
from pegboard.toolkit.http.generation import Answers
from pegboard.toolkit.http.levels import LARGE, USER
from pegboard.toolkit.http.routing import api_router
from pegboard.toolkit.media.inputs import MediaInput, MediaPrompt


class MediaBody(RequestModel):
    """Addresses of pictures, and how many tokens of how many answers."""

    urls: list[str]
    tokens: int = 1
    n: int = 1


class MediaRouter(ApiRouter[NoOptions]):
    """One route."""

    def routes(self) -> fastapi.APIRouter:
        router = api_router(dependencies=[USER])
        router.post("/media", dependencies=[LARGE])(self.answer)
        return router

    async def answer(self, request: Request) -> Response:
        body = await parse_body(request, MediaBody)
        media = tuple(MediaInput(kind="image", url=url, place=f"urls.{i}") for i, url in enumerate(body.urls))
        prompt = MediaPrompt(base="a" + "<|image|>" * len(media), media=media)
        sampling = SamplingParams(max_new_tokens=body.tokens)
        asked = [GenerateRequest(prompt=prompt, sampling=sampling, add_special_tokens=False) for _ in range(body.n)]
        return await until_disconnect(request, self._answered(asked))

    async def _answered(self, asked: list[GenerateRequest]) -> Response:
        answers = await Answers.submit(self.client, asked)
        async with contextlib.aclosing(answers):
            async for _ in answers.chunks():
                pass
        return json_response({"ends": [one.finish_reason for one in answers.answers]})
