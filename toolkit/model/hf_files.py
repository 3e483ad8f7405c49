"""The small JSON files of a model directory in Hugging Face's layout."""

from __future__ import annotations

import json
import math
import os
from itertools import chain
from pathlib import Path
from typing import Any

from pegboard.core.interfaces.errors import ModelError

MAX_DEPTH = 100
"""Levels of nesting in a model's JSON file. Its values are copied, compared and printed by recursive code."""
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
"""Numbers that JSON has not got. transformers writes each as an object, ``{"__float__": "Infinity"}``."""


def read_json_object(file: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the JSON object in `file`; empty where there is no such file. Raises ModelError for anything else, naming
    it.
    """
    path = Path(file)
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_hook=_object)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    except RecursionError:
        raise ModelError(f"{path} is nested too deeply, {MAX_DEPTH} levels at most") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, found {type(value).__name__}")
    if _deeper(value, MAX_DEPTH):
        raise ModelError(f"{path} is nested too deeply, {MAX_DEPTH} levels at most")
    return value


def _object(value: dict[str, object]) -> object:
    """Return an object as it was read, or the number that it stands for."""
    name = value.get("__float__")
    return _FLOATS[name] if len(value) == 1 and isinstance(name, str) and name in _FLOATS else value


def _deeper(value: object, levels: int) -> bool:
    """Return whether there are values more than `levels` below this one."""
    row = [value]
    for _ in range(levels + 1):
        below = [one.values() if isinstance(one, dict) else one for one in row if isinstance(one, dict | list)]
        row = list(chain.from_iterable(below))
        if not row:
            return False
    return True


def eos_token_ids(directory: str | os.PathLike[str]) -> frozenset[int]:
    """Return every id that ends an answer according to generation_config.json and config.json. Raises ModelError for
    ids that are no integers.
    """
    path = Path(directory)
    config = read_json_object(path / "config.json")
    text = config.get("text_config")
    generation = read_json_object(path / "generation_config.json")
    found: set[int] = set()
    for file, source in (("generation_config", generation), ("config", config), ("config", text)):
        value = source.get("eos_token_id") if isinstance(source, dict) else None
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(one) is int for one in ids):
            raise ModelError(
                f"{path / file}.json: eos_token_id must be an integer or a list of them, found {value!r:.80}"
            )
        found.update(ids)
    return frozenset(found)
