"""Trees by dotted paths, from pairs of texts and back."""

from __future__ import annotations

import pytest

from pegboard.core.interfaces.errors import ConfigError
from pegboard.toolkit.text.dotted_trees import dotted, nested, tree_of, value_at


def test_pairs_become_one_tree_with_origins() -> None:
    data, origins = tree_of([("A", "a.b", "1"), ("B", "a.c.d", "[x, 2]"), ("C", "e", "")])
    assert data == {"a": {"b": 1, "c": {"d": ["x", 2]}}, "e": ""}
    assert origins == {"a.b": "A", "a.c.d": "B", "e": "C"}


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [("a", "null", None), ("a", "yes please", "yes please"), ("a", "{broken", "{broken"), ("x.api_key", "007", "007")],
)
def test_texts_are_yaml_unless_they_are_keys(path: str, text: str, value: object) -> None:
    assert value_at(tree_of([("here", path, text)])[0], path, "absent") == value


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([("A", "a", "1"), ("B", "a.b", "2")], r"a\.b: 'a' has been given a value of its own \[B\]"),
        ([("A", ".".join("a" * 200), "1")], "has 200 levels, too many"),
        ([("A", "a", "{1: x}")], r"a: .*1 \(int\) is not a string"),
        ([("A", "a", "[" * 5000 + "]" * 5000)], "nested too deeply"),
    ],
)
def test_what_is_not_a_tree(pairs: list[tuple[str, str, str]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tree_of(pairs)


def test_paths() -> None:
    assert dotted(("apis", 0, "use")) == "apis[0].use"
    assert nested("a.b.c", 1) == {"a": {"b": {"c": 1}}}
    assert value_at({"a": {"b": 0}}, "a.b") == 0
    assert value_at({"a": {"b": 0}}, "a.b.c", "absent") == "absent"
