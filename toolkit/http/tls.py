"""HTTPS: the context of certificate and key, checked before anything is loaded."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Protocol

from pegboard.core.interfaces.errors import ConfigError, Problem


class TlsFiles(Protocol):
    """Names of PEM files, None for what is not set: the section `server.tls` of a config."""

    @property
    def cert_file(self) -> str | None: ...
    @property
    def key_file(self) -> str | None: ...
    @property
    def key_password_file(self) -> str | None: ...
    @property
    def client_ca_file(self) -> str | None: ...


def tls_context(tls: TlsFiles) -> ssl.SSLContext | None:
    """Return a context for the server, TLS 1.2 and later; None where no certificate is set. Raises ConfigError naming
    the file that is wrong.
    """
    if tls.cert_file is None:
        return None
    for name in ("cert_file", "key_file", "key_password_file", "client_ca_file"):
        _check_readable(f"server.tls.{name}", getattr(tls, name))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load_certificate(context, tls, tls.cert_file)
    if tls.client_ca_file is not None:
        try:
            context.load_verify_locations(tls.client_ca_file)
        except ssl.SSLError as error:
            raise _wrong("client_ca_file", f"{tls.client_ca_file} holds no certificates in PEM format", error) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load_certificate(context: ssl.SSLContext, tls: TlsFiles, cert_file: str) -> None:
    asked = False

    def password() -> bytes:
        # Without this, OpenSSL would ask on the terminal.
        nonlocal asked
        asked = True
        return b"" if tls.key_password_file is None else Path(tls.key_password_file).read_bytes().rstrip(b"\r\n")

    key_file = tls.key_file or cert_file
    try:
        context.load_cert_chain(cert_file, tls.key_file, password)
    except (ssl.SSLError, ValueError) as error:
        if asked and tls.key_password_file is None:
            problem = f"{key_file} is encrypted: set server.tls.key_password_file"
            raise _wrong("key_file", problem) from None
        if asked:
            raise _wrong("key_password_file", f"is not the password of {key_file}", error) from None
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            raise _wrong("key_file", f"{key_file} is not the key of the certificate in {cert_file}") from None
        files = cert_file if tls.key_file is None else f"{cert_file} and {key_file}"
        problem = f"{files} must hold a certificate and its private key in PEM format"
        raise _wrong("cert_file", problem, error) from None


def _check_readable(path: str, name: str | None) -> None:
    if name is None:
        return
    try:
        Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(Problem(path, f"{name} cannot be read: {error.strerror}")) from None


def _wrong(key: str, problem: str, error: Exception | None = None) -> ConfigError:
    reason = getattr(error, "reason", None) or ""
    return ConfigError(Problem(f"server.tls.{key}", f"{problem} ({reason})" if reason else problem))
