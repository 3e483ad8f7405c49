"""What the parts of ApiRouter's suite share: the routes' examples, and how a router is asked."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from pegboard.conformance.api_router.texts import (
    CALLER,
    Event,
    Unreadable,
    all_texts,
    is_stream,
    own_script,
    read_events,
    wrong_with,
)
from pegboard.conformance.asgi import Exchange, call
from pegboard.conformance.fake_client import FakeEngineClient, prompt_text
from pegboard.conformance.fakes import session_store
from pegboard.conformance.rig.fake_media import fake_processor
from pegboard.conformance.suite import ContractSuite
from pegboard.core.interfaces.api_router import ApiContext, ApiRouter
from pegboard.toolkit.http.app import build_app
from pegboard.toolkit.http.keys import Keys
from pegboard.toolkit.http.openapi import example_of
from pegboard.toolkit.media.service import reader_of

MAX_BODY = 100_000


@dataclass(frozen=True)
class Sample:
    """A POST route with a body that works. `whole` and `stream` are what the body says for an answer in one piece and
    for a stream; None where there is no such answer. `prompt` is where the example has its prompt, if that is found.
    """

    path: str
    body: dict[str, Any]
    schema: dict[str, Any] = field(default_factory=dict)
    whole: Mapping[str, Any] | None = None
    stream: Mapping[str, Any] | None = None
    prompt: tuple[Any, ...] | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(self.schema.get("properties", {}))

    @property
    def ways(self) -> list[Mapping[str, Any]]:
        """Changes of the body, for each way to answer."""
        return [one for one in (self.whole, self.stream) if one is not None]

    def encode(self, **changes: Any) -> bytes:
        return json.dumps({**self.body, **changes}).encode()

    def with_raw(self, name: str, value: bytes) -> bytes:
        """Return the body with this JSON, whatever it is, as the value of a field."""
        others = {other: one for other, one in self.body.items() if other != name}
        return b"{%s: %s%s" % (json.dumps(name).encode(), value, (b", " if others else b"") + self._tail(others))

    @staticmethod
    def _tail(others: dict[str, Any]) -> bytes:
        return json.dumps(others)[1:].encode()


class ApiSuite(ContractSuite):
    """Base of the parts."""

    contract = "api"

    whole_with: ClassVar[Mapping[str, Any]] = MappingProxyType({"stream": False})
    """What a body says for an answer in one piece."""

    stream_with: ClassVar[Mapping[str, Any]] = MappingProxyType({"stream": True})
    """What a body says for a stream. A route whose body has no such field streams always or never."""

    sampling_names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """How bodies call sampling parameters, where the suite does not know it: ``{"limit": "max_new_tokens"}``; "" for a
    field that is none although it is called like one. A field of an object in the body is ``options.limit``."""

    takes_media: ClassVar[bool] = False
    """Whether the suite runs with a model that takes pictures and video, instead of one that reads text alone. For an
    API that has fields of its own for such models, in a second test class."""

    _found: ClassVar[list[Sample]]
    _reaching: ClassVar[list[Sample]]

    # ---- how answers are read -------------------------------------------------------------------------------------

    def read(self, exchange: Exchange) -> list[Event]:
        """Return the events or lines of a stream, or the one answer. The suite knows server-sent events, lines of JSON,
        JSON and text by their content types; an API that has something else overrides this.
        """
        return read_events(exchange.headers.get("content-type", ""), exchange.body)

    def texts(self, events: Sequence[Event]) -> list[str]:
        """Return every text that an answer spells, one of which has to be the model's. By default all strings: those at
        one place of events of one kind together. An API that spells texts in another way (backwards, in numbers)
        overrides this.
        """
        return all_texts(events)

    def said(self, exchange: Exchange) -> list[str]:
        """`texts` of an answer; fails the test where it cannot be read."""
        try:
            return self.texts(self.read(exchange))
        except Unreadable as error:
            pytest.fail(f"{exchange.path}: the answer cannot be read: {error}")

    def check_text(self, exchange: Exchange, number: int) -> None:
        """Fail the test unless an answer has the text of the request of this number, and has it once."""
        assert exchange.status == 200, (exchange.path, exchange.status, exchange.body)
        wrong = wrong_with(self.said(exchange), number)
        assert not wrong, f"{exchange.path}: {wrong}"

    # ---- how a router is asked ------------------------------------------------------------------------------------

    def make_app(self, client: FakeEngineClient, max_body_bytes: int = MAX_BODY, keys: Keys | None = None) -> FastAPI:
        """Return the router as the server mounts it."""
        if self.takes_media and reader_of(client) is None:
            client.take_media(fake_processor())
        services = {"session_store": session_store()}
        router: ApiRouter = self.build(ApiContext(client=client, max_body_bytes=max_body_bytes, services=services))
        return build_app([("under test", router)], max_body_bytes=max_body_bytes, keys=keys)

    def api_routes(self) -> list[APIRoute]:
        client = asyncio.run(_make())
        if self.takes_media:
            client.take_media(fake_processor())
        router: ApiRouter = self.build(ApiContext(client=client, max_body_bytes=MAX_BODY))
        return [route for route in router.routes().routes if isinstance(route, APIRoute)]

    def samples(self) -> list[Sample]:
        """Return every POST route that documents an example of its body."""
        kind = type(self)
        # Of this class alone: one that derives from it may have other options.
        if "_found" not in vars(kind):
            kind._found = [self._sample(route) for route in self.api_routes() if _has_example(route)]
        return kind._found

    def _sample(self, route: APIRoute) -> Sample:
        content = (route.openapi_extra or {})["requestBody"]["content"]["application/json"]
        schema = content.get("schema", {})
        chooses = set(self.stream_with) <= set(schema.get("properties", {}))
        whole, stream = (self.whole_with, self.stream_with) if chooses else ({}, None)
        return Sample(route.path, example_of(route) or {}, schema, whole, stream)

    def generating(self, *, streams: bool = False, whole: bool = False) -> list[Sample]:
        """Return the samples whose example reaches the engine. Skips the test where there are none."""
        kind = type(self)
        if "_reaching" not in vars(kind):
            kind._reaching = [one for one in map(self._probed, self.samples()) if one is not None]
        found = [
            one
            for one in kind._reaching
            if (one.stream is not None or not streams) and (one.whole is not None or not whole)
        ]
        if not found:
            pytest.skip("no route documents an example that " + ("streams" if streams else "generates"))
        return found

    def _probed(self, sample: Sample) -> Sample | None:
        client = asyncio.run(_make())
        done = asyncio.run(call(self.make_app(client), "POST", sample.path, sample.encode(**(sample.whole or {}))))
        if not client.requests:
            return None
        if is_stream(done.headers.get("content-type", "")):
            sample = replace(sample, whole=None, stream=sample.whole if sample.stream is None else sample.stream)
        return replace(sample, prompt=asyncio.run(self._prompt_of(sample)))

    async def _prompt_of(self, sample: Sample) -> tuple[Any, ...] | None:
        client = FakeEngineClient()
        app = self.make_app(client)
        paths: list[tuple[Any, ...]] = list(leaves(sample.body))
        for path in paths[::-1]:
            await call(app, "POST", sample.path, {**with_suffix(sample.body, path, "caller"), **sample.ways[0]})
            if client.requests and "caller" in prompt_text(client.requests[-1].prompt):
                return path
        return None

    def asking(self, sample: Sample, number: int, padding: str = "") -> dict[str, Any]:
        """Return the example, its prompt naming the caller: the answer is then that of this number. The example as it
        is where none of its strings is in the prompt.
        """
        if sample.prompt is None:
            return sample.body
        return with_suffix(sample.body, sample.prompt, padding + CALLER.format(number))

    async def ask(self, sample: Sample, way: Mapping[str, Any], number: int = 0, **client: Any) -> Exchange:
        """Return a whole exchange, with a client that has a text of its own for every request."""
        app = self.make_app(FakeEngineClient(own_script, **client))
        return await call(app, "POST", sample.path, {**self.asking(sample, number), **way})


def _has_example(route: APIRoute) -> bool:
    return example_of(route) is not None and "POST" in (route.methods or ())


def leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where a body has strings."""
    if isinstance(data, str):
        yield path
    elif isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from leaves(value, (*path, key))


def with_suffix(body: dict[str, Any], path: tuple[Any, ...], suffix: str) -> dict[str, Any]:
    """Return the body with a string that is longer."""
    changed = copy.deepcopy(body)
    *above, last = path
    place: Any = changed
    for key in above:
        place = place[key]
    place[last] += suffix
    return changed


async def _make() -> FakeEngineClient:
    return FakeEngineClient()
