"""Keys: who is let in, what an error says, and what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegboard.core.config.compose import compose
from pegboard.core.config.sections import ServerSection
from pegboard.core.interfaces.errors import ConfigError
from pegboard.toolkit.http import keys as module
from pegboard.toolkit.http.keys import Keys, key_of

BOTH = Keys(user=["u1", "u2"], admin=["a1"])


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": f"Bearer {key}".encode()}


@pytest.mark.parametrize(
    ("keys", "headers", "opens"),
    [
        (Keys(), {}, {"public", "user", "admin"}),
        (BOTH, {}, {"public"}),
        (BOTH, bearer("u1"), {"public", "user"}),
        (BOTH, bearer("u2"), {"public", "user"}),
        (BOTH, bearer("a1"), {"public", "user", "admin"}),
        (BOTH, {b"x-api-key": b"u2"}, {"public", "user"}),
        (BOTH, {b"x-api-key": b"a1"}, {"public", "user", "admin"}),
        (BOTH, bearer("u"), {"public"}),
        (BOTH, bearer("u1 "), {"public", "user"}),
        (BOTH, bearer("u11"), {"public"}),
        (BOTH, bearer("é"), {"public"}),
        (BOTH, {b"authorization": b"u1"}, {"public"}),
        (BOTH, {b"authorization": b"Basic u1"}, {"public"}),
        (BOTH, {b"authorization": b"bearer u1"}, {"public", "user"}),
        (BOTH, {b"authorization": b"Bearer "}, {"public"}),
        (BOTH, {b"authorization": b"Bearer u1,a1"}, {"public"}),
        (Keys(user=["u"]), bearer("u"), {"public", "user"}),
        (Keys(user=["u"]), {}, {"public"}),
        (Keys(admin=["a"]), bearer("a"), {"public", "user", "admin"}),
        (Keys(admin=["a"]), {}, {"public"}),
    ],
)
def test_what_a_key_opens(keys: Keys, headers: dict[bytes, bytes], opens: set[str]) -> None:
    assert {level for level in ("public", "user", "admin") if keys.refusal(level, headers) is None} == opens


@pytest.mark.parametrize(
    ("keys", "headers", "status", "code"),
    [
        (BOTH, {}, 401, "missing_api_key"),
        (BOTH, bearer("wrong-key"), 401, "invalid_api_key"),
        (BOTH, bearer("u1"), 403, "admin_key_required"),
        (Keys(user=["u1"]), bearer("u1"), 403, "admin_key_required"),
        (Keys(user=["u1"]), {}, 401, "missing_api_key"),
    ],
)
def test_refusals(keys: Keys, headers: dict[bytes, bytes], status: int, code: str) -> None:
    error = keys.refusal("admin", headers)
    assert error is not None
    assert (error.status, error.code) == (status, code)
    assert "wrong-key" not in error.message
    # OpenAI's words, by which clients tell this from other bad requests.
    assert ("Incorrect API key provided" in error.message) == (code == "invalid_api_key")
    # Without an admin key nobody could ever enter: the operator learns why.
    assert ("server.admin_key must be set" in error.message) == (keys is not BOTH and status == 403)


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of one length, by compare_digest, and all of them whichever is right."""
    compared: list[tuple[int, int]] = []
    plain = module.hmac.compare_digest  # type: ignore[attr-defined]

    def noting(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return plain(one, other)

    monkeypatch.setattr(module.hmac, "compare_digest", noting)  # type: ignore[attr-defined]
    for key in ("u1", "u2", "a1", "none", "x" * 10_000):
        compared.clear()
        BOTH.granted(key.encode())
        assert compared == [(32, 32)] * 3


def test_keys_of_nobody_are_none() -> None:
    assert key_of({}) is None
    assert key_of({b"x-api-key": b" "}) is None
    assert not Keys()
    assert Keys(admin=["a"])


def server(**values: object) -> ServerSection:
    return compose(data={"model": {"path": "x/y"}, "server": values}, env={}).engine.server


def test_keys_come_from_values_and_files(tmp_path: Path) -> None:
    users, admins = tmp_path / "users", tmp_path / "admins"
    users.write_text("one\n\n two \n")
    admins.write_text("three")
    keys = Keys.of(server(api_key="zero", api_key_file=str(users), admin_key_file=str(admins)))
    assert [keys.granted(key) for key in (b"zero", b"one", b"two", b"three", b"four", b"")] == [
        "user",
        "user",
        "user",
        "admin",
        "public",
        "public",
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file"),
        ("", "holds no key"),
        ("good\nsecret with spaces\n", "key 2 must be"),
        ("x" * 513, "key 1 must be"),
        ("sécret", "other characters"),
        ("ann: one\nann: two", "name of key 2 must"),
        ("1: one", "name of key 1 must"),
        ("a:b: one", "name of key 1 must"),
        ("a: one\nb: one", "name of key 2 must"),
        (": one", "name of key 1 must"),
        ("good #alice", "key 1 must be"),
        ("good\tann", "key 1 must be"),
        ("ann: one two", "key 1 must be"),
    ],
)
def test_files_without_keys_stop_the_start(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=words) as caught:
        Keys.of(server(api_key_file=str(file)))
    assert "server.api_key_file" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "xxx" not in str(caught.value)


def test_who_asks_is_told_by_name_or_number_and_never_by_key(tmp_path: Path) -> None:
    users, admins = tmp_path / "users", tmp_path / "admins"
    users.write_text("ann: one\ntwo")
    admins.write_text("  bob:   three ")
    keys = Keys.of(server(api_key="zero", api_key_file=str(users), admin_key_file=str(admins)))
    asked = [b"zero", b"one", b"two", b"three", b"four", b"ann"]
    assert [keys.asker({b"x-api-key": key}) for key in asked] == ["1", "ann", "3", "bob", "0", "0"]
    assert Keys().asker({b"x-api-key": b"one"}) == ""
    salts = keys.salts()
    assert set(salts) == {"1", "ann", "3", "bob"}
    assert len(set(salts.values())) == 4
    assert Keys(["two"]).salts()["1"] in salts.values(), "a key's salt does not depend on its place"


def test_files_that_others_can_read_are_pointed_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("one")
    for mode, warned in ((0o644, True), (0o600, False)):
        file.chmod(mode)
        caplog.clear()
        Keys.of(server(admin_key_file=str(file)))
        assert ("chmod 600" in caplog.text) == warned


def test_a_key_is_not_for_both() -> None:
    with pytest.raises(ConfigError, match="every user would be an admin"):
        Keys.of(server(api_key=["a", "b"], admin_key="b"))


@pytest.mark.parametrize("text", ["plain", "1e5", "007", "true", "~x", "{x}", "a#b", "*x", "@x"])
def test_the_environment_takes_keys_as_they_stand(text: str) -> None:
    """What YAML would make a number or a mapping is a key like any other."""
    for name in ("API_KEY", "ADMIN_KEY"):
        found = compose(data={"model": {"path": "x/y"}}, env={f"PEGBOARD__SERVER__{name}": text}).engine.server
        assert getattr(found, name.lower()) == (text,)
    overridden = compose(data={"model": {"path": "x/y"}}, env={}, overrides=[f"server.api_key={text}"]).engine.server
    assert overridden.api_key == (text,)


def test_several_keys_in_the_environment() -> None:
    found = compose(data={"model": {"path": "x/y"}}, env={"PEGBOARD__SERVER__API_KEY": "[one, two]"})
    assert found.engine.server.api_key == ("one", "two")


@pytest.mark.parametrize("value", [7, "", ["a", 7], {"a": "b"}, "two words", "x" * 600, ["ok", "ü"], None])
def test_what_is_no_key_is_refused_without_showing_it(value: object) -> None:
    """An empty one too: whoever sets it means to have a key."""
    with pytest.raises(ConfigError, match=r"server\.api_key") as caught:
        server(api_key=value)
    for shown in ("7", "two", "xxx", "ü", "'b'"):
        assert shown not in str(caught.value)
