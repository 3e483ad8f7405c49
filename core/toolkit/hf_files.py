"""The small JSON files of a model directory in Hugging Face's layout."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pegboard.core.interfaces.errors import ModelError


def read_json_object(file: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in `file`; empty where there is no such file. Raises ModelError for anything else."""
    path = Path(file)
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def eos_token_ids(directory: str | os.PathLike[str]) -> frozenset[int]:
    """Every id that ends an answer according to generation_config.json and config.json."""
    path = Path(directory)
    config = read_json_object(path / "config.json")
    text = config.get("text_config")
    found: set[int] = set()
    for source in (read_json_object(path / "generation_config.json"), config, text if isinstance(text, dict) else {}):
        value = source.get("eos_token_id")
        found.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    return frozenset(found)
