"""What `make test-one NAME=...` runs."""

from __future__ import annotations

import pytest

from tests.house.find import BUILTINS, TESTS, find, words


def test_a_plugin_is_a_folder() -> None:
    assert find("cache_hiradix") == sorted([TESTS / "plugins" / "cache_hiradix", *BUILTINS])
    assert find("attn_triton") == [TESTS / "plugins" / "attn_triton"]


def test_suites_are_taken_by_the_plugins_name() -> None:
    """One that has nothing but its suite has no folder."""
    assert words("cache_none") == [*map(str, BUILTINS), "-k", "cache_none"]
    assert words("attn_triton") == [str(TESTS / "plugins" / "attn_triton")]


def test_a_module_is_a_file() -> None:
    assert TESTS / "core" / "config" / "test_compose.py" in find("compose")


def test_a_contract_brings_its_mutants() -> None:
    assert find("prefix_cache") == [TESTS / "mutants" / "test_prefix_cache_mutants.py"]


@pytest.mark.parametrize("name", ["cache_radx", "test_cache_radx.py"])
def test_a_near_miss_is_suggested(name: str) -> None:
    with pytest.raises(LookupError, match="did you mean cache_radix"):
        find(name)


@pytest.mark.parametrize("name", ["", ".", "*", "/x", "../core"])
def test_a_name_is_needed(name: str) -> None:
    with pytest.raises(LookupError, match="such as cache_radix"):
        find(name)
