"""What an API says of a budget, and what the halves tell each other."""

from __future__ import annotations

from typing import Annotated

import msgspec

NAME = "thinking_budget"

_Text = Annotated[str, msgspec.Meta(max_length=256)]
_Mark = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Marks = Annotated[tuple[_Mark, ...], msgspec.Meta(min_length=1, max_length=8)]


class Thoughts(msgspec.Struct, frozen=True, kw_only=True):
    """How thoughts are marked in an answer; see `pegboard.toolkit.parsing.output_parser.ThoughtForm`. `text` is what
    the answer begins with already, or the end of it, as `pegboard.toolkit.parsing.thoughts.Watch.rest` has it.
    """

    begin: _Mark
    ends: _Marks
    opened: bool = False
    answer: _Text = ""
    text: str = ""


class Budget(Thoughts, frozen=True, kw_only=True):
    """``params["thought_budget"]`` of a request: at most `tokens` of thinking, which one of `closes` then ends."""

    tokens: Annotated[int, msgspec.Meta(ge=0)]
    closes: _Marks


class Asked(Thoughts, frozen=True, kw_only=True):
    """What the stage is told of a request: as Budget, with the tokens of each text of `closes`."""

    tokens: int
    closes: tuple[tuple[int, ...], ...]
