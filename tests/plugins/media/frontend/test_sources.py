"""Where media come from: bytes, and files below the directories that may be named, by whatever way a path goes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.media.frontend.sources import Sources, open_below
from pegboard.plugins.media.frontend.store import Gone, MediaFile, MediaStore
from pegboard.toolkit.media.inputs import MediaInput
from pegboard.toolkit.system.scratch import PREFIX

SECRET = b"a secret"
NOT_READ = "cannot be read"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MediaStore]:
    one = MediaStore(tmp_path / f"{PREFIX}x", 1000)
    yield one
    one.close()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory that may be named, `open`, beside one that may not; and ways from one to the other."""
    inside, outside = tmp_path / "open", tmp_path / "closed"
    (inside / "deep").mkdir(parents=True)
    outside.mkdir()
    (tmp_path / "open-sesame").mkdir()
    for folder in (outside, tmp_path / "open-sesame"):
        (folder / "secret").write_bytes(SECRET)
    (inside / "picture").write_bytes(b"pixels")
    (inside / "deep" / "a b").write_bytes(b"more")
    (inside / "way out").symlink_to(outside / "secret")
    (inside / "folder out").symlink_to(outside)
    (inside / "way in").symlink_to(inside / "deep" / "a b")
    (inside / "nowhere").symlink_to(inside / "missing")
    (inside / "circle").symlink_to(inside / "circle")
    os.mkfifo(inside / "pipe")
    return tmp_path


def received(sources: Sources, file: MediaFile, media: MediaInput) -> bytes:
    sources.check(media)
    sources.receive(media, file)
    return file.path.read_bytes()


def refusal(sources: Sources, file: MediaFile, media: MediaInput) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        received(sources, file, media)
    return caught.value


def test_bytes_and_addresses(store: MediaStore) -> None:
    sources = Sources(10)
    file = store.create()
    assert received(sources, file, MediaInput(kind="image", data=b"0123456789")) == b"0123456789"
    assert (store.bytes, file.size) == (10, 10)
    assert received(sources, store.create(), MediaInput(kind="image", url="DATA:,0123456789")) == b"0123456789"
    for media in (MediaInput(kind="image", data=bytes(11)), MediaInput(kind="image", url="data:," + "x" * 11)):
        assert refusal(sources, store.create(), media).code == "media_too_large"
    for media in (MediaInput(kind="image"), MediaInput(kind="image", url="data:,x", data=b"x")):
        assert refusal(sources, store.create(), media).code == "invalid_media_address"
    assert refusal(sources, store.create(), MediaInput(kind="image", url="data:,")).code == "invalid_media"


def test_a_file_that_nothing_needs_any_more(store: MediaStore) -> None:
    file = store.create()
    file.drop()
    with pytest.raises(Gone):
        Sources(10).receive(MediaInput(kind="image", data=b"x"), file)
    assert store.bytes == 0


def test_no_room_in_the_store(store: MediaStore) -> None:
    held = store.create()
    held.take(995)
    error = refusal(Sources(10), store.create(), MediaInput(kind="image", data=bytes(6)))
    assert (error.status, error.code) == (503, "media_store_full")


@pytest.mark.parametrize("url", ["http://open.test/", "HTTPS://open.test/"])
def test_nothing_is_fetched_unless_the_config_says_so(store: MediaStore, url: str) -> None:
    error = refusal(Sources(10), store.create(), MediaInput(kind="image", url=url))
    assert "media.fetch" in error.message
    assert error.status == 400


@pytest.mark.parametrize("url", ["open.test", "/etc/passwd", "ftp://open.test/", "javascript:1", "C:\\x", "blob:x", ""])
def test_other_schemes(store: MediaStore, url: str) -> None:
    assert refusal(Sources(10), store.create(), MediaInput(kind="image", url=url)).code == "invalid_media_address"


def test_files(store: MediaStore, tree: Path) -> None:
    sources = Sources(10, directories=(str(tree / "missing"), str(tree / "open")))
    for name, content in [
        ("picture", b"pixels"),
        ("deep/a%20b", b"more"),
        ("way%20in", b"more"),
        ("deep/../picture", b"pixels"),
    ]:
        for head in ("file://", "file://localhost", "FILE:"):
            assert (
                received(sources, store.create(), MediaInput(kind="image", url=f"{head}{tree}/open/{name}")) == content
            )


WAYS = [
    *("closed/secret", "open-sesame/secret", "open/../closed/secret", "open/%2e%2e/closed/secret", "open/way%20out"),
    *("open/folder%20out/secret", "open/nowhere", "open/circle", "open/missing", "open/missing/../picture"),
    *("open", "open/", "open/deep", "open/pipe", "open/picture/x", "open/a%00b", "open/%FF"),
]


@pytest.mark.parametrize("way", WAYS)
def test_ways_that_lead_nowhere(store: MediaStore, tree: Path, way: str) -> None:
    """All of them read the same: what is not below the directory is not to be found out."""
    sources = Sources(10, directories=(str(tree / "open"),))
    error = refusal(sources, store.create(), MediaInput(kind="image", url=f"file://{tree}/{way}"))
    assert NOT_READ in error.message
    assert str(tree) not in error.message
    assert error.code == "media_source_not_allowed"


@pytest.mark.parametrize(
    "url", ["file://server/{0}/open/picture", "file:open/picture", "file:", "file:///" + "x" * 9000]
)
def test_addresses_that_are_no_files_of_here(store: MediaStore, tree: Path, url: str) -> None:
    sources = Sources(10, directories=(str(tree / "open"),))
    assert NOT_READ in refusal(sources, store.create(), MediaInput(kind="image", url=url.format(tree))).message


def test_no_files_where_no_directory_is_listed(store: MediaStore, tree: Path) -> None:
    error = refusal(Sources(10), store.create(), MediaInput(kind="image", url=f"file://{tree}/open/picture"))
    assert "media.allowed_paths" in error.message
    assert NOT_READ not in error.message


def test_a_link_that_is_put_on_the_way_meanwhile(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at a path and the opening of it."""
    inside = tree / "open"
    look = os.path.realpath

    def look_and_swap(path: str, *, strict: bool = False) -> str:
        found = look(path, strict=strict)
        if str(path).endswith("a b") and not (inside / "deep").is_symlink():
            (inside / "deep").rename(inside / "old")
            (inside / "deep").symlink_to(tree / "closed")
            (tree / "closed" / "a b").write_bytes(SECRET)
        return found

    monkeypatch.setattr(os.path, "realpath", look_and_swap)
    with pytest.raises(OSError):
        open_below(str(inside / "deep" / "a b"), (str(inside),))
    assert (inside / "deep").is_symlink()


def test_files_are_bounded_like_all_others(store: MediaStore, tree: Path) -> None:
    (tree / "open" / "large").write_bytes(bytes(11))
    sources = Sources(10, directories=(str(tree / "open"),))
    error = refusal(sources, store.create(), MediaInput(kind="image", url=f"file://{tree}/open/large"))
    assert error.code == "media_too_large"
