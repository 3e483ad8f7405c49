"""What can be set."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pegboard.core.interfaces.options import Options


class ThinkOptions(Options):
    """Models that think between `<think>` and `</think>`."""

    starts_open: bool = False
    """Answers begin with thinking, even if neither they nor the prompt have the marker. Off: the marker is required."""


class MarkerOptions(ThinkOptions):
    """Models with markers of their own."""

    begin: Annotated[str, Field(min_length=1, max_length=64)] = "<think>"
    """Marker that begins thinking, at the start of an answer or the end of the prompt."""
    end: Annotated[str, Field(min_length=1, max_length=64)] = "</think>"
    """Marker that ends thinking."""
    special_tokens: bool = False
    """The markers are special tokens, so answers are generated with special tokens kept."""
