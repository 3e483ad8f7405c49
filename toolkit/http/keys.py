"""The keys of a server, and what they allow."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from pydantic import TypeAdapter, ValidationError

from pegboard.core.interfaces.errors import ConfigError, InvalidRequest, Problem
from pegboard.core.interfaces.options import MAX_KEY_LENGTH, Key
from pegboard.toolkit.http.levels import Level
from pegboard.toolkit.http.route_table import STRICTNESS

logger = logging.getLogger(__name__)

_KEY = TypeAdapter(Key)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_NAME_RULE = "begin with a letter and have at most 64 letters, digits, '.', '_' or '-'"


class KeySettings(Protocol):
    """Keys, and names of files with keys: the section `server` of a config."""

    @property
    def api_key(self) -> tuple[str, ...]: ...
    @property
    def api_key_file(self) -> str | None: ...
    @property
    def admin_key(self) -> tuple[str, ...]: ...
    @property
    def admin_key_file(self) -> str | None: ...


class Keys:
    """API keys and admin keys. An admin key opens everything, an API key what is for users, none what is public.

    Without any key everything is open. With one, everything is closed that it does not open: a server that has API
    keys only lets no one at what is for admins, and one that has admin keys only lets no one else at what is for users.
    Keys are kept and compared as digests, all of them each time, so that the time taken says nothing about them.
    """

    def __init__(self, user: Iterable[str] = (), admin: Iterable[str] = (), names: Mapping[str, str] = {}) -> None:
        user, admin = list(user), list(admin)
        self._user = [_digest(key.encode()) for key in user]
        self._admin = [_digest(key.encode()) for key in admin]
        self._names = [names.get(key, str(number)) for number, key in enumerate([*user, *admin], 1)]

    @classmethod
    def of(cls, server: KeySettings) -> Keys:
        """Return the keys of a config. Raises ConfigError for a file that cannot be read, or a key that is none."""
        names: dict[str, str] = {}
        user = [*server.api_key, *_read("server.api_key_file", server.api_key_file, names)]
        admin = [*server.admin_key, *_read("server.admin_key_file", server.admin_key_file, names)]
        if set(user) & set(admin):
            raise ConfigError(Problem("server.admin_key", "is an API key as well; every user would be an admin"))
        return cls(user, admin, names)

    def __bool__(self) -> bool:
        return bool(self._user or self._admin)

    def granted(self, key: bytes | None) -> Level:
        """Return the strictest level that a key opens; without a key, or with a wrong one, what is public."""
        if key is None:
            return "public"
        digest = _digest(key)
        admin = _is_among(digest, self._admin)
        user = _is_among(digest, self._user)
        return "admin" if admin else "user" if user else "public"

    def asker(self, headers: Mapping[bytes, bytes]) -> str:
        """Return the name of the key that a request brings, for ASKER: the one that its file gives it, or its number
        among all keys; "0" where the request brings none of them, "" where there are no keys.
        """
        key = key_of(headers)
        digest = b"" if key is None else _digest(key)
        found = "0" if self else ""
        for name, one in zip(self._names, [*self._user, *self._admin], strict=True):
            if hmac.compare_digest(digest, one):
                found = name
        return found

    def salts(self) -> dict[str, str]:
        """Return what separates the cached prefixes of each key's requests, by its name: the same wherever the key
        stands in the config, and after a restart. It does not tell the key.
        """
        digests = [*self._user, *self._admin]
        return {name: _digest(b"cache salt" + one).hex() for name, one in zip(self._names, digests, strict=True)}

    def refusal(self, needed: Level, headers: Mapping[bytes, bytes]) -> InvalidRequest | None:
        """Return why a request may not have what needs this level; None where it may."""
        if needed == "public" or not self:
            return None
        key = key_of(headers)
        granted = self.granted(key)
        if STRICTNESS[granted] >= STRICTNESS[needed]:
            return None
        if granted == "public":
            return _unknown(key)
        why = "this needs the admin key" if self._admin else "this is for admins only: server.admin_key must be set"
        return InvalidRequest(why, status=403, code="admin_key_required")


def key_of(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return the key that a request brings: ``Authorization: Bearer KEY``, or ``x-api-key: KEY``."""
    scheme, _, key = headers.get(b"authorization", b"").strip().partition(b" ")
    if scheme.lower() == b"bearer" and key.strip():
        return key.strip()
    return headers.get(b"x-api-key", b"").strip() or None


def _unknown(key: bytes | None) -> InvalidRequest:
    if key is None:
        return InvalidRequest(
            "a key is needed: send the header 'Authorization: Bearer KEY'", status=401, code="missing_api_key"
        )
    # LiteLLM knows a wrong key by OpenAI's words for it; with others it tells users that the request was bad.
    why = "Incorrect API key provided: it is not a key of this server"
    return InvalidRequest(why, status=401, code="invalid_api_key")


def _read(path: str, name: str | None, names: dict[str, str]) -> list[str]:
    """Return the keys in a file, one per line, as ``KEY`` or ``NAME: KEY``; `names` gets the names by key."""
    if name is None:
        return []
    file = Path(name)
    try:
        lines = [_named(line.strip()) for line in file.read_text("ascii").splitlines() if line.strip()]
        shared = file.stat().st_mode & 0o077
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it holds other characters than ASCII's"
        raise ConfigError(Problem(path, f"{name} cannot be read: {reason}")) from None
    keys = [key for _, key in lines]
    if not keys:
        raise ConfigError(Problem(path, f"{name} holds no key: it must have one per line"))
    for number, key in enumerate(keys, 1):
        try:
            _KEY.validate_python(key)
        except ValidationError:
            problem = f"{name}: key {number} must be at most {MAX_KEY_LENGTH} characters, without spaces"
            raise ConfigError(Problem(path, problem)) from None
    for number, (called, key) in enumerate(lines, 1):
        if called is None:
            continue
        if not _NAME.fullmatch(called) or called in names.values() or key in names:
            problem = (
                f"{name}: the name of key {number} must {_NAME_RULE}, and be the only key's, as the key its only one"
            )
            raise ConfigError(Problem(path, problem))
        names[key] = called
    if shared:
        logger.warning("%s: %s can be read by others (chmod 600 %s)", path, name, name)
    return keys


def _named(line: str) -> tuple[str | None, str]:
    """Name and key. Only a colon with a space after it ends a name: nothing that was meant otherwise becomes one."""
    name, colon, key = line.partition(": ")
    return (name, key.strip()) if colon else (None, line)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _is_among(digest: bytes, known: Iterable[bytes]) -> bool:
    found = False
    for other in known:
        found |= hmac.compare_digest(digest, other)
    return found
