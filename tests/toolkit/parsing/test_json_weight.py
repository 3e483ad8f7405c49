"""The weight of JSON texts."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.parsing.json_weight import MAX_TEXTS, OF_CONTAINER, OF_NAME, OF_STRING, JsonTexts, JsonWeight


def weight_of(data: bytes, *cuts: int) -> int:
    weight = JsonWeight()
    for start, end in zip((0, *cuts), (*cuts, len(data)), strict=True):
        weight.add(data[start:end])
    return weight.total


def values_in(data: Any) -> int:
    """The weight, counted in what a parser has made."""
    if isinstance(data, str):
        return OF_STRING
    if isinstance(data, list):
        return OF_CONTAINER + max(len(data) - 1, 0) + sum(map(values_in, data))
    if isinstance(data, dict):
        members = sum(OF_NAME + OF_STRING + values_in(value) for value in data.values())
        return OF_CONTAINER + max(len(data) - 1, 0) + members
    return 0


AWKWARD = [
    "",
    '"',
    "\\",
    '\\"',
    "a\\\\",
    ',{}[]:"' * 3,
    'a: {"b": [1, 2, "\\\\"]}',
    "\n\t\x00",
    "ü, 漢字, 😀",
    "\ud83d",
    "\\u005c\\",
]


@pytest.mark.parametrize("ascii_only", [True, False])
def test_it_is_what_a_parser_makes_wherever_the_pieces_end(ascii_only: bool) -> None:
    """Whatever strings hold, escaped or not."""
    rng = random.Random(5)

    def value(depth: int) -> Any:
        kind = rng.randrange(6 if depth else 4)
        if kind < 2:
            return rng.choice(AWKWARD)
        if kind < 4:
            return rng.choice([0, -1.5e9, True, None])
        items = [value(depth - 1) for _ in range(rng.randrange(4))]
        return items if kind == 4 else {f"{i}{rng.choice(AWKWARD)}": one for i, one in enumerate(items)}

    for _ in range(80):
        made = value(4)
        data = json.dumps(made, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
        expected = values_in(made)
        assert weight_of(data) == expected, data
        for cut in range(len(data)):
            assert weight_of(data, cut) == expected, (data, cut)
        assert weight_of(data, *range(1, len(data))) == expected, data


@pytest.mark.parametrize(
    ("text", "wide"),
    [
        ('"plain, ü, 漢字"', False),
        ('"😀"', True),
        (r'"\u6f22\u5b57"', False),
        ('"한국어, \ud7ff"', False),
        (r'"\ud55c\uad6d\uc5b4, \uD7FF, \ufb01"', False),
        (r'"\uD83D\uDE00"', True),
        (r'"\udBff\udfff"', True),
        (r'"\ud83d\ude00"', True),
    ],
)
def test_wide_characters_are_found_wherever_the_pieces_end(text: str, wide: bool) -> None:
    data = text.encode()
    for cut in range(len(data)):
        weight = JsonWeight()
        weight.add(data[:cut])
        weight.add(data[cut:])
        assert weight.wide == wide, cut
    for size in range(1, 7):
        weight = JsonWeight()
        for start in range(0, len(data), size):
            weight.add(data[start : start + size])
        assert weight.wide == wide, size


def test_the_texts_of_a_request_are_bounded_together() -> None:
    texts = JsonTexts()
    text = "[" + "{}," * (MAX_TEXTS // (OF_CONTAINER + 1) // 2) + "{}]"
    assert len(texts.parse(text, "x")) > 1000  # type: ignore[arg-type]
    assert JsonTexts().parse('"a, long: text, {}" ', "x") == "a, long: text, {}"
    with pytest.raises(InvalidRequest, match=r"messages\.5: its JSON text has too many values"):
        texts.parse(text, "messages.5")
