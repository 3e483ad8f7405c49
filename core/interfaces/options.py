"""The base of a provider's options."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict
from typing_extensions import TypeVar


class Options(BaseModel):
    """Base of the options model that `Provider.config` names: frozen, and strict about unknown keys.

    Every field needs a type, a default and a description; they become docs, schema and error messages.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def provides(self, declared: frozenset[str]) -> frozenset[str]:
        """Return which of the capabilities that the record declares the provider has with these options: all by
        default. None can be added. Asked before the provider is imported, so it may import nothing heavy.
        """
        return declared


class NoOptions(Options):
    """The options of a provider that has none."""


OptionsT = TypeVar("OptionsT", bound=Options, default=Any)
"""The type of a provider's options. A plugin says it once: ``class RadixCache(PrefixCache[RadixOptions])``."""
