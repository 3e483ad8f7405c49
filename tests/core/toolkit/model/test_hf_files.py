"""The small files around a model, and where caches go."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegboard.core.interfaces.errors import ModelError
from pegboard.core.toolkit.model.hf_files import eos_token_ids, read_json_object
from pegboard.core.toolkit.system.cache_dir import default_cache_dir


def test_absent_files_are_empty_objects(tmp_path: Path) -> None:
    assert read_json_object(tmp_path / "nothing.json") == {}
    assert eos_token_ids(tmp_path) == frozenset()


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not valid JSON"), ("[1]", "must hold a JSON object, found list")]
)
def test_broken_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=rf"config\.json {message}"):
        read_json_object(tmp_path / "config.json")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PEGBOARD_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_cache_dir() == Path("/home/someone/.cache/pegboard")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache_dir() == Path("/xdg/pegboard")
    monkeypatch.setenv("PEGBOARD_CACHE", "~/models")
    assert default_cache_dir() == Path("/home/someone/models")
