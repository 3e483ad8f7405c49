"""Contract: HTTP routes onto the engine client."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pegboard.core.interfaces.options import Component, OptionsT

if TYPE_CHECKING:
    import fastapi

    from pegboard.core.interfaces.client import EngineClient
    from pegboard.core.interfaces.plugin import BodyField


@dataclass(frozen=True, slots=True)
class ApiContext:
    """The engine client, and the largest request body in bytes that the server lets through (to routes that declare
    LARGE). `services` are what plugins have built for the APIs (the hook `api_services`), by name. `providers` are the
    names of what the server has chosen itself, by contract; those of the engine are in ``client.info.providers``.
    `body_fields` are the fields of bodies that chosen providers declare, by provider name: routes that generate read
    them with `pegboard.toolkit.http.request_fields.with_declared`.
    """

    client: EngineClient
    max_body_bytes: int
    services: Mapping[str, object] = field(default_factory=dict)
    providers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    body_fields: Mapping[str, Sequence[BodyField]] = field(default_factory=dict)


class ApiRouter(Component[OptionsT, ApiContext]):
    """Brings routes. Runs in the API process: imports neither torch nor transformers.

    Every route declares who may use it: PUBLIC, USER or ADMIN of `pegboard.toolkit.http.levels`; and LARGE, where
    it takes prompts: others get bodies of 1 MiB at most.
    """

    def __init__(self, options: OptionsT, ctx: ApiContext) -> None:
        super().__init__(options, ctx)
        self.client = ctx.client

    @classmethod
    def own_fields(cls) -> frozenset[str]:
        """Return the fields that its bodies have. A config with a provider that declares one of them too is refused."""
        return frozenset()

    @abc.abstractmethod
    def routes(self) -> fastapi.APIRouter:
        """Return the routes, with full paths. Bad input is answered with 4xx in this API's own error format, which
        errors of the server at these paths take too (`pegboard.toolkit.http.routing.api_router(errors=...)`);
        InvalidRequest carries status and field. A path that two routers claim stops the start.
        """
