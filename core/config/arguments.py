"""What the command line says of a config besides `--set`: models and files by their names, and short options."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pegboard.core.config.sources import Layer, read_file
from pegboard.core.interfaces.errors import ConfigError, Problem
from pegboard.toolkit.text.plain_trees import FILE_SUFFIXES

ARGUMENT = "argument"
"""Origin of a model that was named without a key."""


def names_file(argument: str) -> bool:
    """Return whether an argument is a config file, going by its ending; anything else names a model."""
    return Path(argument).suffix.lower() in FILE_SUFFIXES and not Path(argument).is_dir()


def read_arguments(arguments: Iterable[str | Path]) -> tuple[list[Layer], list[Layer]]:
    """Return the layers of the config files among these, in their order, and that of the model, if one is named.

    Raises ConfigError for a file that cannot be read, and for two models.
    """
    texts = [str(argument) for argument in arguments]
    models = [text for text in texts if not names_file(text)]
    if len(models) > 1:
        named = " and ".join(map(repr, models))
        raise ConfigError(Problem("model.path", f"{named} are two models, and a server has one", ARGUMENT))
    files = [read_file(text) for text in texts if names_file(text)]
    return files, [Layer(ARGUMENT, {"model": {"path": model}}) for model in models]


def read_options(options: Iterable[tuple[str, str, object]]) -> Layer:
    """Return the layer of short options: (flag, dotted path, value) each. Those without a value are left out."""
    data: dict[str, dict[str, object]] = {}
    origins: dict[str, str] = {}
    for flag, path, value in options:
        if value is not None:
            section, _, key = path.partition(".")
            data.setdefault(section, {})[key] = value
            origins[path] = flag
    return Layer("command line", data, origins)
