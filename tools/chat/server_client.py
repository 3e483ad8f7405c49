"""A server's JSON routes and its event streams."""

from __future__ import annotations

import contextlib
import json
import ssl
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from pegboard.core.interfaces.errors import InvalidRequest, PegboardError

CONNECT_SECONDS = 10.0
ASK_AGAIN_SECONDS = 1.0
"""Between two questions to a server that is loading its model."""


class ServerClient:
    """A server at a URL such as ``http://127.0.0.1:30000``, with or without ``/v1`` after it.

    Every request has a connection of its own. Once it is open, no time limit applies: a long queue is not an error, and
    Ctrl-C ends the wait. Proxies of the environment are not used.
    """

    def __init__(self, url: str, api_key: str = "") -> None:
        """Open no connection yet. Raise PegboardError for a URL that no server can have."""
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/').removesuffix('/v1')}"
        try:
            host = httpx.URL(self.url).host
        except httpx.InvalidURL:
            host = ""
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
            raise PegboardError(f"--url: {url!r} is not an address such as http://127.0.0.1:30000")
        self._tls = parts.scheme == "https"
        self._headers = {
            "content-type": "application/json",
            "accept": "application/json, text/event-stream",
            "accept-encoding": "identity",  # packed events could come late
        }
        if api_key:
            if not api_key.isascii() or not api_key.isprintable():
                raise PegboardError("the API key has characters that a key cannot have")
            self._headers["authorization"] = f"Bearer {api_key}"

    def models(self, *, wait: Callable[[], contextlib.AbstractContextManager[Any]]) -> list[str]:
        """Return what the server offers. One that is loading its model is waited for, within `wait`."""
        with contextlib.ExitStack() as stack:
            waiting = False
            while True:
                try:
                    data = self.get("/v1/models")
                    return [str(one["id"]) for one in data["data"]]
                except InvalidRequest as error:
                    if error.code != "not_ready":
                        raise
                except (KeyError, TypeError):
                    raise PegboardError(f"{self.url} answers, but not as a server with OpenAI's API does") from None
                if not waiting:
                    stack.enter_context(wait())
                    waiting = True
                time.sleep(ASK_AGAIN_SECONDS)

    def get(self, path: str) -> Any:
        """Return the JSON at a path. Raises PegboardError."""
        with self._response("GET", path, None) as response:
            try:
                return json.loads(response.read())
            except (ValueError, httpx.HTTPError):
                raise PegboardError(f"{self.url}{path} answers, but not with JSON") from None

    def events(self, path: str, body: Any) -> Iterator[dict[str, Any]]:
        """Yield the events that answer a POST, up to ``[DONE]``. Raises PegboardError where they end before. Closing
        this generator closes the connection.
        """
        with self._response("POST", path, body) as response:
            try:
                for raw in _lines(response):
                    line = raw.strip()
                    if line.startswith(b"data:"):
                        data = line[5:].strip()
                        if data == b"[DONE]":
                            return
                        yield json.loads(data)
            except (ValueError, httpx.HTTPError):
                raise PegboardError(f"{self.url} broke off in the middle of the answer") from None
        raise PegboardError(f"{self.url} broke off in the middle of the answer")

    @contextlib.contextmanager
    def _response(self, method: str, path: str, body: Any) -> Iterator[httpx.Response]:
        """Yield an answer with a good status. Raises PegboardError where there is none."""
        data = None if body is None else json.dumps(body).encode()
        with contextlib.ExitStack() as stack:
            try:
                client = stack.enter_context(self._client())
                response = stack.enter_context(client.stream(method, self.url + path, content=data))
            except (OSError, httpx.TransportError) as error:
                raise PegboardError(self._unreachable(error)) from None
            if response.status_code != 200:
                raise self._refusal(response, path)
            yield response

    def _client(self) -> httpx.Client:
        return httpx.Client(
            headers=self._headers,
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            trust_env=False,
            # OpenSSL's own choice of authorities, which SSL_CERT_FILE changes.
            verify=ssl.create_default_context() if self._tls else False,
        )

    def _unreachable(self, error: BaseException) -> str:
        if isinstance(error, httpx.ConnectTimeout):
            return f"{self.url} does not answer within {CONNECT_SECONDS:g} s"
        if isinstance(error, httpx.RemoteProtocolError):
            return self._other_protocol()
        # What the operating system said; httpx keeps the text alone.
        while (inner := error.__cause__ or error.__context__) is not None:
            error = inner
        if isinstance(error, ConnectionRefusedError):
            return f"nothing listens at {self.url}; start a server with `pegboard serve`, or mend --url"
        if isinstance(error, ssl.SSLCertVerificationError):
            reason = error.verify_message
            return f"{self.url}: the certificate is not trusted: {reason}; SSL_CERT_FILE names those that are"
        if isinstance(error, ssl.SSLError):
            return self._other_protocol()
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return f"{self.url} cannot be reached: {reason}"

    def _other_protocol(self) -> str:
        other = "http" if self._tls else "https"
        return f"{self.url} does not speak {'HTTPS' if self._tls else 'HTTP'}; is it {other}://?"

    def _refusal(self, response: httpx.Response, path: str) -> PegboardError:
        status, code = response.status_code, ""
        message = f"{self.url}{path} answers with status {status} ({response.reason_phrase})"
        with contextlib.suppress(ValueError, LookupError, TypeError, httpx.HTTPError):
            error = json.loads(response.read())["error"]
            message, code = str(error["message"]), str(error.get("code") or "")
        if status in (401, 403):
            message += " (--api-key-file, or PEGBOARD_API_KEY in the environment)"
        elif status == 404 and not code:
            message += "; it has no OpenAI API there"
        return InvalidRequest(message, code=code, status=status)


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """Yield the lines of a body. `iter_lines` of httpx also cuts at characters such as U+2028, which JSON may hold."""
    rest = b""
    for data in response.iter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
    if rest:
        yield rest
