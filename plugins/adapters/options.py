"""The section `adapters` of the config, beside `use`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field

from pegboard.core.interfaces.options import NameList, PositiveInt, SectionFields

MAX_NAME = 256


def _by_name(value: object) -> object:
    """Return adapters by name; ``name=path`` in a list, as vLLM and SGLang write them, is taken, too."""
    if isinstance(value, str):
        value = value.split()
    if not isinstance(value, list | tuple):
        return {} if value is None else value
    pairs = [entry.partition("=") if isinstance(entry, str) else ("", "", "") for entry in value]
    if not all(name and path for name, _, path in pairs):
        raise ValueError("must be a mapping of names to directories, or a list of name=directory")
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise ValueError("names an adapter twice")
    return {name: path for name, _, path in pairs}


Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME, pattern=r"^[^\s:]+$")]
Preload = Annotated[Mapping[Name, str], BeforeValidator(_by_name)]


class AdapterSection(SectionFields):
    """LoRA adapters in PEFT's format, beside the model. They are on if `preload` or `directories` is set."""

    preload: Preload = {}
    """Adapters that are loaded at the start: a mapping of names to directories, or a list of `name=directory`."""
    directories: NameList = ()
    """Directories below which adapters may be loaded while the server runs. Empty: none may."""
    slots: PositiveInt = 8
    """Number of adapters that the running requests can have at once. Requests of others wait for a slot."""
    max_rank: PositiveInt = 64
    """Largest rank of an adapter."""
    host_bytes: PositiveInt = 4 * 1024 * 1024 * 1024
    """Memory for adapters, in bytes. If another one does not fit, those that no request uses leave memory, and are read
    again when a request names them."""
    fair_after: Annotated[float, Field(ge=0)] = 2.0
    """Seconds that a request waits for a slot before no further requests are admitted for the adapter with the fewest
    running ones, whose slot it then gets. After as long again these are retracted."""
    load_timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that a request waits for an adapter that is being loaded; then it ends with status 504."""

    @property
    def on(self) -> bool:
        """Whether there can be adapters."""
        return bool(self.preload or self.directories)
