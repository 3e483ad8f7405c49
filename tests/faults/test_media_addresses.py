"""Addresses from which no media are fetched: each is refused with 400, and none leads to a connection that may not be.

A server listens at an address that may be connected to and at one that may not, on one port, and notes both.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.media.frontend.addresses import resolve
from pegboard.plugins.media.frontend.fetch import Fetcher, FetchLimits
from tests.plugins.media.frontend.web import CLOSED, OPEN, Web, endless, fetcher, moved, web, whole

HIDDEN = "this address cannot be fetched"


@pytest.fixture(scope="module")
def site() -> Iterator[Web]:
    with web() as one:
        port = one.port
        one.answers["/"] = whole(b"inside")
        one.answers["/closed"] = moved(f"http://closed.test:{port}/")
        one.answers["/literal"] = moved(f"http://{CLOSED}:{port}/")
        one.answers["/both"] = moved(f"//both.test:{port}/")
        one.answers["/user"] = moved(f"http://a:b@open.test:{port}/")
        one.answers["/port"] = moved("http://open.test:22/")
        one.answers["/file"] = moved("file:///etc/passwd")
        one.answers["/gopher"] = moved(f"gopher://open.test:{port}/")
        one.answers["/empty"] = moved("")
        one.answers["/blank"] = moved("http://open .test/")
        one.answers["/loop"] = moved("/loop")
        one.answers["/hex"] = moved(f"http://0x7f000002:{port}/")
        one.answers["/slow"] = endless(b"HTTP/1.1 200 OK\r\n\r\n", b"x", pause=0.05)
        yield one


def error_of(one: Fetcher, url: str) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        one.fetch(url, lambda data: None)
    assert (caught.value.status, caught.value.code) == (400, "media_not_fetched")
    return caught.value


# What is hidden reads the same, whatever the reason.
SILENT = [
    *(
        "http://closed.test:{port}/",
        "http://both.test:{port}/",
        "http://{closed}:{port}/",
        "http://unknown.test:{port}/",
    ),
    *("http://[::1]:{port}/", "http://[::ffff:127.0.0.2]:{port}/", "http://[64:ff9b::7f00:2]:{port}/"),
    *("http://[2002:7f00:2::]:{port}/", "http://[2001:0:1::1]:{port}/", "http://[fe80::1]:{port}/"),
    *("http://169.254.169.254:{port}/latest/meta-data/", "http://[fd00:ec2::254]:{port}/", "http://0.0.0.0:{port}/"),
    *("http://127.0.0.3:{port}/", "http://10.1.2.3:{port}/", "http://192.168.0.1:{port}/", "http://100.64.0.1:{port}/"),
    *("http://224.0.0.1:{port}/", "http://255.255.255.255:{port}/", "http://\uff11\uff12\uff17.0.0.2:{port}/"),
    *("http://mapped.test:{port}/", "http://zone.test:{port}/", "http://none.test:{port}/", "http://odd.test:{port}/"),
    *("http://open.test:{port}/closed", "http://open.test:{port}/literal", "http://open.test:{port}/both"),
    *("http://open.test:{port}/user", "http://open.test:{port}/port", "http://open.test:{port}/file"),
    *("http://open.test:{port}/gopher", "http://open.test:{port}/blank", "http://open.test:{port}/hex"),
    *("https://open.test:{port}/", "http://open.test:{port}/slow"),
]
TOLD = [
    "http://2130706434:{port}/",
    "http://0x7f000002:{port}/",
    "http://0x7f.0x2:{port}/",
    "http://0177.0.0.2:{port}/",
    "http://017700000002:{port}/",
    "http://127.2:{port}/",
    "http://127.0.0.02:{port}/",
    "http://[::1%25lo]:{port}/",
    "http://user@open.test:{port}/",
    "http://user:word@open.test:{port}/",
    "http://:@open.test:{port}/",
    "http://open.test:22/",
    "http://open.test/",
    "http://open.test:99999/",
    "http://open.test:{port}@closed.test/",
    "http://open.test:{port}\\@closed.test/",
    "http://open.test:{port}/a\r\nHost: closed.test",
    "http://open.test:{port}/a b",
    "http://:{port}/",
    "http:///{port}",
    "http://open..test:{port}/",
    "http://[::1:{port}/",
    "gopher://open.test:{port}/",
    "ftp://open.test:{port}/",
    "//open.test:{port}/",
    "http://open.test:{port}/" + "x" * 10_000,
]
NAMES = {
    "mapped.test": ["::ffff:127.0.0.2"],
    "zone.test": ["fe80::1%1"],
    "none.test": [],
    "odd.test": ["127.0.0.1.example"],
}


def test_there_are_enough() -> None:
    assert len(SILENT) + len(TOLD) >= 40


@pytest.mark.parametrize("form", [*SILENT, *TOLD])
def test_refused_without_a_connection(site: Web, form: str) -> None:
    site.touched.clear()
    url = form.replace("{port}", str(site.port)).replace("{closed}", CLOSED)
    error = error_of(fetcher(site, NAMES, seconds=1.0), url)
    # The first one is only where the way begins that leads inside.
    assert site.touched == [OPEN] * ("open.test" in url and form in SILENT)
    if form in SILENT:
        assert error.message == HIDDEN
    assert "127.0.0" not in error.message


@pytest.mark.parametrize("path", ["/loop", "/empty"])
def test_redirects_in_a_circle(site: Web, path: str) -> None:
    assert error_of(fetcher(site), site.url(path)).message.startswith(HIDDEN)


def test_with_the_system_s_own_resolver(site: Web) -> None:
    """Without anything injected: names and numbers of this machine, as the system reads them."""
    site.touched.clear()
    limits = FetchLimits(ports=(site.port,), seconds=5.0)
    for host in ("localhost", OPEN, CLOSED, "[::1]", "ip6-localhost", "unknown.invalid"):
        assert error_of(Fetcher(limits), f"http://{host}:{site.port}/").message == HIDDEN
    assert site.touched == []
    assert OPEN in resolve("localhost", 80)


def test_names_that_turn_inside_between_two_looks(site: Web) -> None:
    """The one that was looked at is the one that is connected to, and there is no second look."""
    site.touched.clear()
    looks: list[str] = []

    def turning(host: str, port: int) -> list[str]:
        looks.append(host)
        return [OPEN] if len(looks) % 2 else [CLOSED]

    one = fetcher(site, resolve=turning)
    one.fetch(site.url("/"), lambda data: None)
    assert (looks, site.touched) == (["open.test"], [OPEN])
    assert error_of(one, site.url("/")).message == HIDDEN
    assert site.touched == [OPEN]


def test_ports_and_domains(site: Web) -> None:
    one = fetcher(site, domains=(".test",))
    one.fetch(site.url("/"), lambda data: None)
    assert "allowed_domains" in error_of(one, site.url("/", "open.example")).message
    assert "allowed_domains" in error_of(fetcher(site, domains=("test",)), site.url("/")).message
    assert "fetch_ports" in error_of(fetcher(site, ports=(443,)), site.url("/")).message
