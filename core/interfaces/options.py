"""Bases: of options, of fields of config sections, and of what is built with options."""

from __future__ import annotations

import abc
from typing import Annotated, Any, Generic

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, Strict
from typing_extensions import TypeVar

PositiveInt = Annotated[int, Field(gt=0)]
MAX_KEY_LENGTH = 512
Key = Annotated[str, Strict(), Field(min_length=1, max_length=MAX_KEY_LENGTH, pattern=r"^[!-~]+$")]
"""An API key, as a header can carry it. A number in a file is refused: YAML would have changed it (007 is 7)."""
NameList = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    BeforeValidator(lambda value: value if isinstance(value, list | tuple) else [] if value is None else [value]),
]
"""A list of names; one name is a list of one, and null an empty one."""

SectionT = TypeVar("SectionT", bound="SectionFields")


class SectionFields(BaseModel):
    """Base of what `Plugin.fields` and `Contract.section` name: keys that stand in a section of the core as its own.

    Every field needs a type, a default and a description. Its validators run with the section's.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, coerce_numbers_to_str=True, protected_namespaces=()
    )


class Options(BaseModel):
    """Base of the options model that `Provider.config` or `Plugin.config` names: frozen, and strict about unknown keys.

    Every field needs a type, a default and a description; they become docs, schema and error messages.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    _sections: tuple[BaseModel, ...] = PrivateAttr(default=())
    """The config's sections to which the plugin adds fields; set when the config is composed."""

    def provides(self, declared: frozenset[str]) -> frozenset[str]:
        """Return which of the capabilities that the record declares the provider has with these options: all by
        default. None can be added. Asked before the provider is imported, so it may import nothing heavy.
        """
        return declared

    def section(self, fields: type[SectionT]) -> SectionT:
        """Return the values of fields that this plugin adds to a section of the core (`Plugin.fields`): the defaults
        where no config has been composed, as in tests.
        """
        return next((one for one in self._sections if isinstance(one, fields)), None) or fields()


class NoOptions(Options):
    """The options of a provider that has none."""


OptionsT = TypeVar("OptionsT", bound=Options, default=Any)
"""The type of a provider's options. A plugin says it once: ``class RadixCache(PrefixCache[RadixOptions])``."""
CtxT = TypeVar("CtxT", default=Any)
"""The type of a contract's context: what its providers are built from, besides their options."""


class Component(abc.ABC, Generic[OptionsT, CtxT]):
    """Base of contracts. The core asks a provider's class whether it `supports` options and context, then builds it."""

    def __init__(self, options: OptionsT, ctx: CtxT) -> None:
        self.options = options
        self.ctx = ctx

    @classmethod
    def supports(cls, options: OptionsT, ctx: CtxT) -> str | None:
        """Return None, or the reason why it cannot work here. Reads no weights, and fetches nothing."""
        return None
