"""Asking the native routes, on a scripted engine that refuses what a real one would refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pegboard.conformance.asgi import Exchange, call
from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.conformance.fakes import session_store
from pegboard.core.frontend.intake import Intake
from pegboard.core.interfaces.api_router import ApiContext
from pegboard.core.interfaces.client import Embedding, EmbedRequest, GenerateRequest, OutputStream
from pegboard.plugins.api_native.options import NativeOptions
from pegboard.plugins.api_native.router import NativeRouter
from pegboard.toolkit.http.app import build_app
from pegboard.toolkit.http.keys import Keys
from tests.features import FEATURES as STAGES

FEATURES = (
    "input_logprobs",
    "hidden_states",
    "embeddings",
    "logits_processor.dry",
    *(f"grammar.{kind}" for kind in ("json_schema", "json_object", "regex", "ebnf", "structural_tag")),
)

CHOSEN = {"tool_parser": ["brackets"]}


class CheckedClient(FakeEngineClient):
    """Lets every request pass the real intake first."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._info = replace(self._info, features=FEATURES, providers={"sampler": ["torch"]})

    async def submit_all(self, requests: Sequence[GenerateRequest]) -> list[OutputStream]:
        for request in requests:
            Intake(self.info, self.tokenizer, STAGES).prepare(request)
        return await super().submit_all(requests)

    async def embed(self, requests: Sequence[EmbedRequest]) -> list[Embedding]:
        for request in requests:
            Intake(self.info, self.tokenizer, STAGES).prepare_embed(request)
        return await super().embed(requests)


@dataclass
class Server:
    """One application, to ask several things of."""

    client: CheckedClient
    app: Any

    @classmethod
    def of(
        cls,
        client: CheckedClient | None = None,
        options: NativeOptions | None = None,
        keys: Keys | None = None,
        **context: Any,
    ) -> Server:
        client = client or CheckedClient()
        services = {"session_store": session_store(max_sessions=3, max_session_tokens=200)}
        ctx = ApiContext(
            client=client, max_body_bytes=2 * 10**6, **{"services": services, "providers": CHOSEN, **context}
        )
        router = NativeRouter(options or NativeOptions(), ctx)  # type: ignore[call-arg]
        return cls(client, build_app([("native", router)], max_body_bytes=2 * 10**6, keys=keys))

    def begin(self, path: str, body: bytes) -> Exchange:
        return Exchange(self.app, "POST", path, body)

    async def get(self, path: str) -> Exchange:
        return await call(self.app, "GET", path)

    async def post(self, path: str, body: Any = None) -> Exchange:
        return await call(self.app, "POST", path, body)

    async def told(self, path: str, body: Any = None) -> Any:
        """The JSON of an answer that must be a good one."""
        done = await self.post(path, body)
        assert done.status == 200, done.body
        return done.json()

    async def generate(self, **body: Any) -> Any:
        return await self.told("/generate", body)

    async def refused(self, path: str, body: Any = None) -> tuple[int | None, str | None]:
        """Status and field of an answer that must be an error."""
        done = await self.post(path, body)
        return done.status, done.json()["error"]["param"]


def played(scene: Callable[[Server], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def play() -> None:
        await scene(Server.of(**settings))

    asyncio.run(play())


def asked(path: str, body: Any = None, **settings: Any) -> tuple[Exchange, CheckedClient]:
    """One POST to a server of its own."""

    async def scene() -> tuple[Exchange, CheckedClient]:
        server = Server.of(**settings)
        return await server.post(path, body), server.client

    return asyncio.run(scene())
