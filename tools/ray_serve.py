"""An application for Ray Serve, each of whose replicas is a server with the same config.

    serve run pegboard.tools.ray_serve:app config=config.yaml

A replica runs ``pegboard serve`` as a child process, at a port of the loopback interface, and passes requests on to it
as they come, and answers as they are written. So a replica is what a server is: its APIs, keys, queue and scheduler.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError
from ray import serve
from ray.serve import Application
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from pegboard.core.config.compose import compose
from pegboard.core.interfaces.errors import InvalidRequest, PegboardError
from pegboard.toolkit.http.errors import answer_error
from pegboard.toolkit.system.bound_command import bound_command

HOP = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    )
)
"""Headers that are about one connection (RFC 9110, 7.6.1), and not about what is passed on."""
MOST_REQUESTS: Final = 256
"""Requests that Ray Serve gives a replica at once, by default: the replica has a queue and limits of its own."""
HEALTH_SECONDS = 20.0
STOP_SECONDS = 15.0
"""How long a server may take to end beyond `server.shutdown_timeout`."""
_LOCAL = ("server.host=127.0.0.1", "server.port=0")


class Arguments(BaseModel):
    """What the application is built with: the path of a config, and keys of it to `set`, as ``--set`` takes them.
    `deployment` are options of Ray Serve's deployment, such as `num_replicas`, `autoscaling_config` and
    `ray_actor_options`.
    """

    model_config = ConfigDict(extra="forbid")

    config: str
    set: list[str] = []
    deployment: dict[str, object] = {}


class Server:
    """A server as a child process of this one, which ends with it."""

    def __init__(self, config: str, overrides: list[str], stop_seconds: float) -> None:
        """Start it. Raises PegboardError where it ends before it is ready."""
        self._stop_seconds = stop_seconds
        self._folder = tempfile.TemporaryDirectory(prefix="pegboard-replica-")
        path = Path(self._folder.name, "config.yaml")
        path.write_text(config, encoding="utf-8")
        sets = [word for override in (*overrides, *_LOCAL) for word in ("--set", override)]
        command = bound_command("pegboard", "serve", str(path), *sets)
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        self.address = ""
        self._ready = threading.Event()
        threading.Thread(target=self._read, name="server-output", daemon=True).start()
        self._ready.wait()
        if not self.address:
            code = self.process.wait()
            self.stop()
            raise PegboardError(f"the server ended with exit code {code} before it was ready; its log says why")

    def _read(self) -> None:
        """Pass on what it writes, and note where it listens."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            if not self.address and (found := re.match(r"Ready on (\S+)$", line)):
                self.address = found[1]
                self._ready.set()
        self._ready.set()

    def stop(self) -> None:
        """End it: running requests have the time of its config. May be called again."""
        self.process.terminate()
        try:
            self.process.wait(self._stop_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._folder.cleanup()


class Replica:
    """One replica: a server, and what passes requests on to it."""

    def __init__(self, config: str, overrides: list[str], stop_seconds: float) -> None:
        self._server = Server(config, overrides, stop_seconds)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=MOST_REQUESTS)
        self._client = httpx.AsyncClient(
            base_url=self._server.address, timeout=None, limits=limits, trust_env=False, verify=False
        )
        self._client.headers.clear()  # a request has its own, and no others

    async def __call__(self, request: Request) -> Response:
        """Pass a request on. The server's answer is passed on while it is written; where the client goes, the server
        learns of it.
        """
        path = request.url.path.removeprefix(request.scope.get("root_path", "")) or "/"
        url = f"{path}?{request.url.query}" if request.url.query else path
        headers = [(name, value) for name, value in request.headers.items() if name not in HOP]
        has_body = "content-length" in request.headers or "transfer-encoding" in request.headers
        sent = self._client.build_request(
            request.method, url, headers=headers, content=request.stream() if has_body else None
        )
        try:
            answer = await self._client.send(sent, stream=True)
        except httpx.TransportError as error:
            message = f"this replica's server does not answer: {error}"
            return answer_error(InvalidRequest(message, code="not_ready", status=503))
        kept = [(name, value) for name, value in answer.headers.multi_items() if name not in HOP]
        response = StreamingResponse(_body(answer), answer.status_code)
        response.raw_headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in kept]
        return response

    async def check_health(self) -> None:
        """Raise where the server does not answer: Ray Serve then replaces this replica."""
        answer = await self._client.get("/health", timeout=HEALTH_SECONDS)
        if answer.status_code != httpx.codes.OK:
            raise RuntimeError(f"/health of the replica's server says {answer.status_code}: {answer.text}")

    def __del__(self) -> None:
        # Ray Serve calls it once the replica's requests are answered.
        if (server := getattr(self, "_server", None)) is not None:
            server.stop()


async def _body(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()


def app(arguments: Mapping[str, object]) -> Application:
    """Return the application. Raises PegboardError for arguments that it does not have, and ConfigError for a config
    that cannot be served.
    """
    try:
        args = Arguments.model_validate(dict(arguments))
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise PegboardError(f"arguments of pegboard.tools.ray_serve:app: {said}") from None
    resolved = compose([Path(args.config)], overrides=[*args.set, *_LOCAL])
    stop_seconds = resolved.engine.server.shutdown_timeout + STOP_SECONDS
    text = Path(args.config).read_text(encoding="utf-8")
    return (
        serve.deployment(Replica).options(**deployment_options(args, stop_seconds)).bind(text, args.set, stop_seconds)
    )


def deployment_options(args: Arguments, stop_seconds: float) -> dict[str, object]:
    """Return the options of Ray Serve's deployment: those of the arguments, and ours where they say nothing."""
    return {
        "name": "Pegboard",
        "max_ongoing_requests": MOST_REQUESTS,
        "graceful_shutdown_timeout_s": 2 * stop_seconds,  # requests are answered first, and then the server is told
        **args.deployment,
    }
