"""HTTPS: what is wrong with files is said before anything is loaded, and what is right speaks TLS."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from pegboard.core.config.compose import compose
from pegboard.core.config.sections import TlsSection
from pegboard.core.interfaces.errors import ConfigError
from pegboard.toolkit.http.tls import tls_context

FILES = Path(__file__).parents[2] / "data" / "tls"


def section(**names: str) -> TlsSection:
    return TlsSection(**{key: str(FILES / name) for key, name in names.items()})


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> str | None:
    """Both ends of a connection, in memory; the version that they agreed on. Raises what either end objects to."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname="localhost"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    # With TLS 1.3 a server's objection to a certificate comes after the client's handshake.
    with pytest.raises(ssl.SSLWantReadError):
        ends[0].read(1)
    return ends[0].version()


def visitor(certificate: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(FILES / "ca.pem"))
    if certificate is not None:
        context.load_cert_chain(FILES / f"{certificate}.pem", FILES / f"{certificate}.key")
    return context


def test_off_by_default() -> None:
    assert tls_context(TlsSection()) is None


def test_certificate_and_key() -> None:
    context = tls_context(section(cert_file="server.pem", key_file="server.key"))
    assert context is not None
    assert shake_hands(context, visitor()) == "TLSv1.3"


def test_both_in_one_file(tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text((FILES / "server.pem").read_text() + (FILES / "server.key").read_text())
    context = tls_context(TlsSection(cert_file=str(both)))
    assert context is not None
    assert shake_hands(context, visitor())


def test_encrypted_key() -> None:
    context = tls_context(section(cert_file="server.pem", key_file="encrypted.key", key_password_file="password"))
    assert context is not None
    assert shake_hands(context, visitor())


def test_old_protocols_are_refused() -> None:
    context = tls_context(section(cert_file="server.pem", key_file="server.key"))
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_clients_with_certificates_only() -> None:
    context = tls_context(section(cert_file="server.pem", key_file="server.key", client_ca_file="ca.pem"))
    assert context is not None
    assert shake_hands(context, visitor("client"))
    for stranger in (None, "stranger"):
        with pytest.raises(ssl.SSLError):
            shake_hands(context, visitor(stranger))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"cert_file": "nowhere"}, "server.tls.cert_file: .*nowhere cannot be read: No such file"),
        ({"cert_file": "server.pem", "key_file": "nowhere"}, "server.tls.key_file: .*nowhere cannot be read"),
        ({"cert_file": "server.pem", "key_file": "stranger.key"}, "server.tls.key_file: .* is not the key of the cert"),
        ({"cert_file": "server.pem", "key_file": "encrypted.key"}, "is encrypted: set server.tls.key_password_file"),
        (
            {"cert_file": "server.pem", "key_file": "encrypted.key", "key_password_file": "make.sh"},
            "server.tls.key_password_file: is not the password of",
        ),
        ({"cert_file": "server.pem"}, "server.tls.cert_file: .*server.pem must hold a certificate and its private key"),
        ({"cert_file": "make.sh", "key_file": "server.key"}, "make.sh and .*server.key must hold a certificate"),
        (
            {"cert_file": "server.pem", "key_file": "server.key", "client_ca_file": "make.sh"},
            "server.tls.client_ca_file: .*make.sh holds no certificates",
        ),
    ],
)
def test_what_is_wrong_is_said(names: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        tls_context(section(**names))
    assert "open-sesame" not in str(caught.value)


@pytest.mark.parametrize("name", ["key_file", "key_password_file", "client_ca_file"])
def test_nothing_without_a_certificate(name: str) -> None:
    with pytest.raises(ConfigError, match=f"server.tls.{name} is set, but server.tls.cert_file is not"):
        compose(data={"model": {"path": "x/y"}, "server": {"tls": {name: "x"}}}, env={})
