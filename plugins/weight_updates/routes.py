"""Routes with which trainers replace weights, and give memory back, as SGLang has them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import Query, Request, Response
from pydantic import BaseModel, Field
from starlette.requests import ClientDisconnect

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.weight_updates.controls import MAX_VERSION
from pegboard.plugins.weight_updates.messages import Tag
from pegboard.toolkit.http.answers import json_response
from pegboard.toolkit.http.bodies import RequestModel, parse_body
from pegboard.toolkit.http.errors import ClientDisconnected
from pegboard.toolkit.http.levels import ADMIN, STREAMED
from pegboard.toolkit.http.openapi import body_docs, error_responses, json_answer
from pegboard.toolkit.http.routing import api_router
from pegboard.toolkit.http.weight_version import BROKEN

if TYPE_CHECKING:
    from fastapi import APIRouter

    from pegboard.core.interfaces.client import EngineClient
    from pegboard.plugins.weight_updates.uploads import Uploads
    from pegboard.toolkit.http.weight_version import ServedWeights

Upload = AbstractContextManager[object]
Mode = Literal["retract", "abort", "in_place"]
GROUP = "weight_update_group"
GroupName = Annotated[str, Field(min_length=1, max_length=256)]
Version = Annotated[str, Field(max_length=MAX_VERSION)]


class DiskBody(RequestModel):
    """New weights in a directory."""

    model_path: str = Field(min_length=1, max_length=4096)
    """A model directory with safetensors, below one of `weight_updates.directories`, or the model's own."""
    weight_version: Version = ""
    """What answers call the new weights; by default a number."""
    mode: Mode = "retract"
    """What becomes of the requests that are there: they are computed again and go on (`retract`), end (`abort`), or
    keep what was computed with the old weights (`in_place`)."""
    abort_all_requests: bool = False
    """The same as the mode `abort`, as SGLang calls it."""
    partial: bool = False
    """Whether tensors may be missing, which stay what they are."""


class GroupBody(RequestModel):
    """A trainer's process group, of which this server is to be a rank."""

    master_address: str = Field(min_length=1, max_length=253)
    """Where the trainer's rank 0 listens."""
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(ge=1)
    """This server's rank; 0 is the trainer, which broadcasts."""
    world_size: int = Field(ge=2, le=100_000)
    group_name: GroupName = GROUP
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """By default gloo on a CPU, and nccl on a GPU."""


class GroupNameBody(RequestModel):
    """A trainer's process group."""

    group_name: GroupName = GROUP


class BroadcastBody(RequestModel):
    """New weights that a trainer broadcasts, in this order."""

    names: list[str] = Field(min_length=1, max_length=1_000_000)
    dtypes: list[str]
    """Such as `bfloat16`."""
    shapes: list[list[int]]
    group_name: GroupName = GROUP
    weight_version: Version = ""
    mode: Mode = "retract"
    abort_all_requests: bool = False
    """The same as the mode `abort`."""
    partial: bool = True
    """Whether tensors may be missing, which stay what they are."""


class NameBody(RequestModel):
    """A tensor to look at."""

    name: str = Field(min_length=1, max_length=1024)
    """As the checkpoint calls it."""
    truncate_size: int = Field(default=100, ge=1, le=100_000)
    """How many numbers are answered at most."""


class TagsBody(RequestModel):
    """Whose memory is meant."""

    tags: list[Tag] | None = None
    """`kv_cache`, `weights`, or both, which is the default."""


class Updated(BaseModel):
    """The weights are new; it took so many seconds during which no step began."""

    success: bool
    message: str
    weight_version: str
    tensors: int
    seconds: float


class Values(BaseModel):
    """The first numbers of a tensor, row after row, and its whole shape."""

    values: list[float]
    shape: list[int]
    dtype: str


class Done(BaseModel):
    """It has been done."""

    success: bool
    message: str


class Routes:
    """The routes. `known` learns of each update; tensors pass through `uploads`."""

    def __init__(self, client: EngineClient, known: ServedWeights, uploads: Uploads) -> None:
        self._client = client
        self._known = known
        self._uploads = uploads
        self._tasks: set[asyncio.Task[Mapping[str, object]]] = set()

    def router(self) -> APIRouter:
        router = api_router(tags=["weights"], dependencies=[ADMIN])
        errors = error_responses(404, 409)
        docs = body_docs(DiskBody, {"model_path": "/checkpoints/step-100"})
        updated = {**json_answer(Updated), **errors}
        disk, tensor = "Replace the weights by those of a directory", "Replace weights by a safetensors file, the body"
        router.post("/update_weights_from_disk", summary=disk, openapi_extra=docs, responses=updated)(self.from_disk)
        docs = {"requestBody": {"required": True, "content": {"application/octet-stream": {}}}}
        path = "/update_weights_from_tensor"
        kept = {**updated, **error_responses(404, 408, 409, 507)}
        add = router.post(path, summary=tensor, openapi_extra=docs, responses=kept, dependencies=[STREAMED])
        add(self.from_tensor)
        self._add_groups(router)
        docs = body_docs(NameBody, {"name": "model.norm.weight"})
        values = {**json_answer(Values), **errors}
        look = "The first numbers of a tensor"
        router.post("/get_weights_by_name", summary=look, openapi_extra=docs, responses=values)(self.by_name)
        docs, done = body_docs(TagsBody, {"tags": ["kv_cache"]}), {**json_answer(Done), **errors}
        for path, what, run in (
            ("/release_memory_occupation", "Give memory back; requests wait", self.release),
            ("/resume_memory_occupation", "Take memory again", self.resume),
        ):
            router.post(path, summary=what, openapi_extra=docs, responses=done)(run)
        return router

    def _add_groups(self, router: APIRouter) -> None:
        errors = error_responses(404, 409)
        shown: dict[str, object] = {
            "master_address": "10.0.0.1",
            "master_port": 29500,
            "rank_offset": 1,
            "world_size": 2,
        }
        new = {"names": ["model.norm.weight"], "dtypes": ["bfloat16"], "shapes": [[576]]}
        done = {**json_answer(Done), **errors}
        for path, what, docs, answers, run in (
            ("init", "Join a trainer's process group", body_docs(GroupBody, shown), done, self.join),
            ("destroy", "Leave a trainer's process group", body_docs(GroupNameBody, {}), done, self.leave),
        ):
            add = router.post(f"/{path}_weights_update_group", summary=what, openapi_extra=docs, responses=answers)
            add(run)
        what, docs = "Replace weights by those that a trainer broadcasts", body_docs(BroadcastBody, new)
        path = "/update_weights_from_distributed"
        router.post(path, summary=what, openapi_extra=docs, responses={**json_answer(Updated), **errors})(
            self.from_trainer
        )

    async def join(self, request: Request) -> Response:
        body = await parse_body(request, GroupBody)
        args: dict[str, object] = {"name": body.group_name, "address": body.master_address, "port": body.master_port}
        args |= {"rank": body.rank_offset, "size": body.world_size, "backend": body.backend}
        await self._client.control("init_weights_group", args)
        return json_response(
            {"success": True, "message": f"this server is rank {body.rank_offset} of {body.group_name}"}
        )

    async def leave(self, request: Request) -> Response:
        body = await parse_body(request, GroupNameBody)
        await self._client.control("destroy_weights_group", {"name": body.group_name})
        return json_response({"success": True, "message": f"{body.group_name} is left"})

    async def from_trainer(self, request: Request) -> Response:
        body = await parse_body(request, BroadcastBody)
        # Of other lengths they are refused where the group can be left: the trainer broadcasts all the same.
        announced = list(itertools.zip_longest(body.names, body.dtypes, body.shapes))
        mode = "abort" if body.abort_all_requests else body.mode
        args: dict[str, object] = {"group": body.group_name, "announced": announced, "mode": mode}
        args |= {"partial": body.partial, "weight_version": body.weight_version}
        return await self._updated(args, {"announced": "names", "group": "group_name"})

    async def from_disk(self, request: Request) -> Response:
        body = await parse_body(request, DiskBody)
        mode = "abort" if body.abort_all_requests else body.mode
        args = {"path": body.model_path, "mode": mode, "partial": body.partial, "weight_version": body.weight_version}
        return await self._updated(args, {"path": "model_path"})

    async def from_tensor(
        self,
        request: Request,
        weight_version: Annotated[str, Query(max_length=MAX_VERSION)] = "",
        mode: Mode = "retract",
        partial: bool = False,
    ) -> Response:
        if "json" in request.headers.get("content-type", ""):
            raise InvalidRequest(
                "the body must be a safetensors file (application/octet-stream); pickled tensors are not taken",
                code="not_safetensors",
            )
        with contextlib.ExitStack() as upload:
            file = upload.enter_context(self._uploads.turn())
            try:
                await self._uploads.keep(request.stream(), file)
            except ClientDisconnect:
                raise ClientDisconnected from None
            kept = upload.pop_all()
        args = {"file": str(file), "mode": mode, "partial": partial, "weight_version": weight_version}
        return await self._updated(args, {}, kept)

    async def _updated(
        self, args: dict[str, object], names: Mapping[str, str], upload: Upload | None = None
    ) -> Response:
        try:
            found = await self._told("update_weights", args, upload)
        except InvalidRequest as error:
            raise error.called(names) from None
        return json_response({"success": True, "message": "the weights are replaced", **found})

    async def _told(self, action: str, args: dict[str, object], upload: Upload | None = None) -> Mapping[str, object]:
        """Run an action that may replace weights, and note what it says of them: also where the client leaves. An
        upload ends with it.
        """
        task = asyncio.ensure_future(self._run(action, args, upload or nullcontext()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _run(self, action: str, args: dict[str, object], upload: Upload) -> Mapping[str, object]:
        with upload:
            try:
                found = await self._client.control(action, args)
            except InvalidRequest as error:
                if error.code == BROKEN:
                    self._known.fault = error.message
                raise
        if "weight_version" in found:
            self._known.learn(found["weight_version"])
        return found

    async def by_name(self, request: Request) -> Response:
        body = await parse_body(request, NameBody)
        args = {"name": body.name, "truncate_size": body.truncate_size}
        return json_response(await self._client.control("get_weights_by_name", args))

    async def release(self, request: Request) -> Response:
        return await self._memory(request, "release_memory", "memory is given back, and requests wait")

    async def resume(self, request: Request) -> Response:
        return await self._memory(request, "resume_memory", "memory is taken again")

    async def _memory(self, request: Request, action: str, message: str) -> Response:
        body = await parse_body(request, TagsBody)
        found = await self._told(action, {"tags": body.tags})
        return json_response({"success": True, "message": message, **found})
