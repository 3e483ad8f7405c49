"""Under which names a server may be asked, by what it listens on."""

from __future__ import annotations

import socket

import pytest

from pegboard.core.config.sections import ServerSection
from pegboard.plugins.http_guard.hosts import Hosts
from pegboard.plugins.http_guard.options import GuardFields
from pegboard.plugins.http_guard.origins import is_own_origin
from pegboard.toolkit.http.listening import listen

MACHINE = socket.gethostname()


@pytest.mark.parametrize(
    ("address", "names", "good", "bad"),
    [
        ("127.0.0.1", (), "localhost LocalHost:1 localhost. 127.0.0.1:30000 127.0.0.2 [::1]:5", "0.0.0.0 10.0.0.1 a.b"),
        ("::1", (), "localhost [::1] 127.0.0.1 [::ffff:127.0.0.1]:1", "[::2] box"),
        ("10.0.0.5", (), "10.0.0.5 10.0.0.5:80", "localhost 10.0.0.6 a.b"),
        ("10.0.0.5", ("a.b", "[fd00::1]"), "10.0.0.5 a.b A.B. a.b:443 [fd00::1]:1", "x.a.b a.b.c b"),
        ("0.0.0.0", (), "localhost 10.0.0.5:1 8.8.8.8 [fd00::1]:1", "a.b 1.2.3.4.a.b a 127.0.0.1@a.b [::1"),
        ("::", (), "localhost 10.0.0.5:1 [fd00::1]:1", "a.b"),
        ("127.0.0.1", ("*",), "a.b 10.0.0.1", ""),
    ],
)
def test_names(address: str, names: tuple[str, ...], good: str, bad: str) -> None:
    hosts = Hosts(address, names)
    assert [name for name in good.split() if hosts.refusal(name.encode())] == []
    assert [name for name in bad.split() if not hosts.refusal(name.encode())] == []
    assert hosts.refusal(None) is None, "browsers send one"


def test_a_public_server_has_its_machines_name() -> None:
    with listen(ServerSection(host="0.0.0.0", port=0)) as listener:
        hosts = Hosts.of("0.0.0.0", (), listener)
    assert hosts.refusal(f"{MACHINE}:30000".encode()) is None


def test_a_private_one_has_not() -> None:
    with listen(ServerSection(port=0)) as listener:
        hosts = Hosts.of("127.0.0.1", ("proxy.test",), listener)
    assert hosts.refusal(b"proxy.test") is None
    if MACHINE.lower() != "localhost":
        assert hosts.refusal(MACHINE.encode()) is not None


@pytest.mark.parametrize(
    ("origin", "host", "own"),
    [
        ("http://a.b", "a.b", True),
        ("https://A.b:5", "a.b:5", True),
        ("http://a.b:5", "a.b", False),
        ("http://a.b.c", "a.b", False),
        ("null", "null", False),
        ("http://a.b", None, False),
    ],
)
def test_origins(origin: str, host: str | None, own: bool) -> None:
    assert is_own_origin(origin.encode(), host and host.encode()) is own  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("a.b", True),
        ("*", True),
        ("[::1]", True),
        ("10.0.0.1", True),
        ("a.b:80", False),
        ("http://a.b", False),
        ("", False),
    ],
)
def test_allowed_hosts_are_names_without_a_port(name: str, good: bool) -> None:
    if good:
        assert GuardFields(allowed_hosts=name).allowed_hosts == (name,)  # type: ignore[arg-type]
    else:
        with pytest.raises(ValueError, match="allowed_hosts"):
            GuardFields(allowed_hosts=(name,))
