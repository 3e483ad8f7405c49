"""What a contract is: its name, version, cardinality, capabilities, and where it stands in the config."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol

from typing_extensions import TypeVar


class Built(Protocol):
    """What the core builds of a provider: all contracts are built and asked in this way."""

    def __init__(self, options: Any, ctx: Any) -> None: ...

    @classmethod
    def supports(cls, options: Any, ctx: Any) -> str | None:
        """Return None, or the reason why it cannot work with this context."""


T = TypeVar("T", bound=Built, default=Any)
"""The abstract class of a contract."""
Ctx = TypeVar("Ctx", default=Any)
"""What its providers are built from."""


class Cardinality(enum.Enum):
    """How many providers of a contract an engine has."""

    ONE = "one"
    """Exactly one, chosen by `use` or, with `use: auto`, by rank."""
    MANY = "many"
    """An ordered list in the config, each provider at most once; the order is the order of the calls."""
    MATCHED = "matched"
    """The first by rank whose `supports` has no objection, unless `use` names one."""


@dataclass(frozen=True, slots=True)
class Contract(Generic[T, Ctx]):
    """One contract, of the core (`contracts`) or of a plugin (`Plugin.contracts`). Its type says what a chosen
    provider of it is, and what that is built from.

    `interface` and `suite` are lazy names of the abstract class and of its conformance suite ("" where the suite lands
    with a later feature). `config_path` is the dotted place of the choice in the config. `capabilities` documents every
    optional part that a provider may declare. With `optional` an engine can do without a provider as long as nothing
    asks for one. `api_side` says that the API process of a server builds it, which imports no others: they bring torch.

    Two fields are for contracts of plugins, which bring their section with them. `section` is the lazy name of a
    `SectionFields`: the section's own keys beside `use`, and in its docstring what the section is about. `default` is
    what the default preset says of a contract of the core: the provider that counts where the config names none.
    """

    name: str
    config_path: str
    cardinality: Cardinality
    interface: str
    summary: str
    suite: str = ""
    version: str = "1.0"
    capabilities: Mapping[str, str] = field(default_factory=dict)
    optional: bool = False
    api_side: bool = False
    section: str = ""
    default: str = "auto"
