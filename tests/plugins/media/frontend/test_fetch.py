"""Fetching from a server that does what it likes: what comes, how much of it, and from where it is taken."""

from __future__ import annotations

import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.media.frontend.fetch import Fetcher
from tests.plugins.media.frontend.web import (
    CLOSED,
    OPEN,
    Web,
    endless,
    fetcher,
    moved,
    says,
    web,
    whole,
)

HIDDEN = "this address cannot be fetched"
OK = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture
def site() -> Iterator[Web]:
    with web() as one:
        yield one


def fetched(one: Fetcher, url: str) -> bytes:
    found: list[bytes] = []
    one.fetch(url, found.append)
    return b"".join(found)


def refused(one: Fetcher, url: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        fetched(one, url)
    assert caught.value.status == 400
    assert caught.value.code in ("media_not_fetched", "media_too_large")
    return caught.value.message


BODY = bytes(range(256)) * 20


@pytest.mark.parametrize(
    "answer",
    [
        whole(BODY, "Content-Type: text/html"),
        says(OK + b"\r\n", BODY[:100], BODY[100:]),
        says(
            OK + b"Transfer-Encoding: chunked\r\n\r\n64\r\n" + BODY[:100] + b"\r\n",
            b"%x;name=value\r\n" % (len(BODY) - 100) + BODY[100:] + b"\r\n0\r\nTrailer: x\r\n\r\n",
        ),
        says(b"HTTP/1.1 100 Continue\r\n\r\n", OK + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY),
        says(b"HTTP/1.0 200 OK\r\n\r\n" + BODY),
    ],
    ids=["length", "until it closes", "chunked", "continue", "old"],
)
def test_bodies(site: Web, answer: Any) -> None:
    site.answers["/x?y=%20z"] = answer
    assert fetched(fetcher(site), site.url("/x?y=%20z#part")) == BODY
    head = site.seen[0].lower()
    assert f"host: open.test:{site.port}\r\n" in head
    assert "accept-encoding: identity\r\n" in head


def test_redirects(site: Web) -> None:
    site.answers.update(
        {"/1": moved("/2"), "/2": moved(site.url("/3"), "307 X"), "/3": moved(f"//open.test:{site.port}/4")}
    )
    site.answers.update({"/4": whole(BODY), "/0": moved("/1")})
    assert fetched(fetcher(site), site.url("/1")) == BODY
    assert refused(fetcher(site), site.url("/0")) == f"{HIDDEN}: more than 3 redirects"


@pytest.mark.parametrize("where", ["http://[x", "http://open.test:99999/", "http://[::1"])
def test_redirects_to_what_is_not_an_address(site: Web, where: str) -> None:
    site.answers["/"] = moved(where)
    assert refused(fetcher(site), site.url("/")) == HIDDEN


@pytest.mark.parametrize("status", [204, 206, 304, 401, 404, 500, 503])
def test_the_class_of_a_status_is_told(site: Web, status: int) -> None:
    site.answers["/"] = whole(b"secret", status=f"{status} Secret")
    assert refused(fetcher(site), site.url("")) == f"{HIDDEN}: its server answered with {status // 100}xx"


@pytest.mark.parametrize(
    "answer",
    [
        whole(bytes(10_001)),
        endless(OK + b"\r\n", bytes(1000)),
        endless(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"3e8\r\n" + bytes(1000) + b"\r\n"),
        says(OK + b"Content-Length: 999999999999\r\n\r\n"),
    ],
    ids=["announced", "endless", "chunked", "only announced"],
)
def test_too_large(site: Web, answer: Any) -> None:
    site.answers["/"] = answer
    assert "more than the 10000 bytes" in refused(fetcher(site), site.url("/"))


@pytest.mark.parametrize(
    "answer",
    [
        endless(OK, b"X-A: b\r\n"),
        endless(OK + b"X-A: ", b"b" * 1000),
        endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        endless(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1;" + b"x" * 500 + b"\r\na\r\n"),
        endless(OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X-A: b\r\n"),
        says(b"not HTTP at all\r\n\r\n"),
        says(OK + b"Content-Length: 10\r\n\r\n12345"),
        says(OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n12345"),
        says(OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"),
        says(b""),
    ],
    ids=[
        "headers",
        "a header",
        "continue",
        "extensions",
        "trailers",
        "no HTTP",
        "cut",
        "two lengths",
        "chunk",
        "silent",
    ],
)
def test_answers_that_are_no_answers(site: Web, answer: Any) -> None:
    site.answers["/"] = answer
    assert refused(fetcher(site), site.url("/")) == HIDDEN


def test_many_small_pieces(site: Web) -> None:
    """Taking them apart would be all that the process does."""
    site.answers["/"] = endless(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n" * 100)
    assert refused(fetcher(site, max_bytes=10**7), site.url("/")) == HIDDEN


@pytest.mark.parametrize(
    "answer",
    [
        endless(b"", b"H", pause=0.02),
        endless(OK + b"X: ", b"y", pause=0.02),
        endless(OK + b"\r\n", b"z", pause=0.02),
        endless(OK + b"Content-Length: 9999\r\n\r\n", b"z", pause=0.02),
        endless(OK + b"Content-Length: 9999\r\n\r\n", b"", pause=0.02),
    ],
    ids=["status", "header", "body", "length", "nothing"],
)
def test_slow_ones_end_at_the_deadline(site: Web, answer: Any) -> None:
    site.answers["/"] = answer
    assert refused(fetcher(site, seconds=0.4), site.url("/")) == HIDDEN


def test_a_slow_resolver_ends_at_the_deadline(site: Web) -> None:
    def resolve(host: str, port: int) -> Sequence[str]:
        site.stopping.wait()
        return [OPEN]

    one = fetcher(site, resolve=resolve, seconds=0.2)
    assert refused(one, site.url("/")) == HIDDEN
    one.close()
    assert site.touched == []


def test_a_name_is_resolved_once(site: Web) -> None:
    """One that means another address a moment later, as names for rebinding do, leads nowhere else."""
    site.answers["/"] = whole(BODY)
    turns = iter([[OPEN], [CLOSED], [CLOSED]])
    one = fetcher(site, resolve=lambda host, port: next(turns))
    assert fetched(one, site.url("/")) == BODY
    assert refused(one, site.url("/")) == HIDDEN
    assert site.touched == [OPEN]


def test_the_first_address_that_answers(site: Web) -> None:
    site.answers["/"] = whole(BODY)
    allowed = {"127.0.0.1", "127.0.0.77"}
    one = fetcher(site, {"two.test": ["127.0.0.77", OPEN]}, allowed=lambda address: str(address) in allowed)
    assert fetched(one, site.url("/", "two.test")) == BODY


def test_proxies_are_not_asked(site: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://{CLOSED}:{site.port}")
    site.answers["/"] = whole(BODY)
    assert fetched(fetcher(site), site.url("/")) == BODY
    assert site.touched == [OPEN]


def test_what_a_sink_raises_ends_it(site: Web) -> None:
    site.answers["/"] = endless(OK + b"\r\n", b"x")

    def sink(data: bytes) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fetcher(site).fetch(site.url("/"), sink)


TLS = Path(__file__).parents[3] / "data" / "tls"
"""Keys of localhost, and the authority that vouches for it."""


@pytest.fixture
def safe() -> Iterator[Web]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "server.pem", TLS / "server.key")
    with web(context) as one:
        one.answers["/"] = whole(BODY)
        yield one


def test_with_tls_the_name_is_what_counts(safe: Web) -> None:
    one = fetcher(safe, {"localhost": [OPEN]}, tls=ssl.create_default_context(cafile=str(TLS / "ca.pem")))
    assert fetched(one, safe.url("/", "localhost", scheme="https")) == BODY
    assert refused(one, safe.url("/", "open.test", scheme="https")) == HIDDEN


def test_an_unknown_certificate(safe: Web) -> None:
    assert refused(fetcher(safe), safe.url("/", scheme="https")) == HIDDEN


def test_no_tls_where_http_is_spoken(site: Web) -> None:
    site.answers["/"] = whole(BODY)
    assert refused(fetcher(site, seconds=2.0), site.url("/", scheme="https")) == HIDDEN


def test_nothing_heavy_is_imported() -> None:
    code = "import pegboard.plugins.media.frontend.building, sys; print({'torch', 'PIL', 'av'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
