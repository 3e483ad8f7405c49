"""A server's JSON routes and its event streams, with nothing but the standard library."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

from pegboard.core.interfaces.errors import InvalidRequest, PegboardError

CONNECT_SECONDS = 10.0
ASK_AGAIN_SECONDS = 1.0
"""Between two questions to a server that is loading its model."""


class ServerClient:
    """A server at a URL such as ``http://127.0.0.1:30000``, with or without ``/v1`` behind it.

    Every request has a connection of its own. Once there is one, nothing is limited in time: a long queue is no error,
    and who does not want to wait can press Ctrl-C. Proxies of the environment are not used.
    """

    def __init__(self, url: str, api_key: str = "") -> None:
        """Connects to nobody. Raises PegboardError for what is no URL."""
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        try:
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError:
            self._host = ""
        if parts.scheme not in ("http", "https") or not self._host or parts.query or parts.fragment:
            raise PegboardError(f"--url: {url!r} is no address such as http://127.0.0.1:30000")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/').removesuffix('/v1')}"
        self._tls = parts.scheme == "https"
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
        if api_key:
            if not api_key.isascii() or not api_key.isprintable():
                raise PegboardError("the API key has characters that a key cannot have")
            self._headers["authorization"] = f"Bearer {api_key}"

    def models(self, *, wait: Callable[[], contextlib.AbstractContextManager[Any]]) -> list[str]:
        """What the server offers. One that is loading its model is waited for, within `wait`."""
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
        """The JSON at a path. Raises PegboardError."""
        with self._response("GET", path, None) as response:
            try:
                return json.loads(response.read())
            except (ValueError, OSError, http.client.HTTPException):
                raise PegboardError(f"{self.url}{path} answers, but not with JSON") from None

    def events(self, path: str, body: Any) -> Iterator[dict[str, Any]]:
        """The events that answer a POST, up to ``[DONE]``. Raises PegboardError where they end before. Closing this
        generator closes the connection.
        """
        with self._response("POST", path, body) as response:
            try:
                for raw in response:
                    line = raw.strip()
                    if line.startswith(b"data:"):
                        data = line[5:].strip()
                        if data == b"[DONE]":
                            return
                        yield json.loads(data)
            except (OSError, http.client.HTTPException, ValueError):
                raise PegboardError(f"{self.url} broke off in the middle of the answer") from None
        raise PegboardError(f"{self.url} broke off in the middle of the answer")

    @contextlib.contextmanager
    def _response(self, method: str, path: str, body: Any) -> Iterator[http.client.HTTPResponse]:
        """An answer with a good status."""
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=CONNECT_SECONDS)
        try:
            try:
                connection.connect()
                connection.sock.settimeout(None)
                data = None if body is None else json.dumps(body).encode()
                connection.request(method, self._base + path, body=data, headers=self._headers)
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise PegboardError(self._unreachable(error)) from None
            if response.status != 200:
                raise self._refusal(response, path)
            yield response
        finally:
            connection.close()

    def _unreachable(self, error: Exception) -> str:
        if isinstance(error, ConnectionRefusedError):
            return f"nothing listens at {self.url}; start a server with `pegboard serve`, or mend --url"
        if isinstance(error, ssl.SSLCertVerificationError):
            reason = error.verify_message
            return f"{self.url}: the certificate is not trusted: {reason}; SSL_CERT_FILE names those that are"
        if isinstance(error, (ssl.SSLError, http.client.BadStatusLine)):
            other = "http" if self._tls else "https"
            return f"{self.url} does not speak {'HTTPS' if self._tls else 'HTTP'}; is it {other}://?"
        if isinstance(error, TimeoutError):
            return f"{self.url} does not answer within {CONNECT_SECONDS:g} s"
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return f"{self.url} cannot be reached: {reason}"

    def _refusal(self, response: http.client.HTTPResponse, path: str) -> PegboardError:
        status, code = response.status, ""
        message = f"{self.url}{path} answers with status {status} ({response.reason})"
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
            error = json.loads(response.read())["error"]
            message, code = str(error["message"]), str(error.get("code") or "")
        if status in (401, 403):
            message += " (--api-key-file, or PEGBOARD_API_KEY in the environment)"
        elif status == 404 and not code:
            message += "; it has no OpenAI API there"
        return InvalidRequest(message, code=code, status=status)
