"""Plugin records: what an entry point of the group `pegboard` names.

A record is plain frozen data in a module that imports neither torch nor transformers, so that listing plugins is quick.
Everything heavy is named by a lazy string, ``"package.module:Name"``, and imported when a provider is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pegboard.core.interfaces.contract import Contract

API_VERSION = "1.0"
"""Version of the record format and of the hook specifications (semver). A plugin states the one it was written for."""

ENTRY_POINT_GROUP = "pegboard"

BODY_CONTRACTS = ("admission_gate", "schedule_policy")
"""Contracts whose providers read `params` of requests."""

INDEX = "index"
"""Beside declared fields: which request of its body this is. No field may have this name."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a provider needs of the provider chosen for another contract.

    `contract` is a contract's name; `capability` a capability that its provider must declare, or None when it is enough
    that one is chosen at all. `why` completes the sentence "X needs ... because ...".
    """

    contract: str
    capability: str | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class BodyField:
    """A field of request bodies that is meant for a provider: ``{"prompt": ..., "<name>": 5}``.

    APIs put what a client gives there into ``params[<provider's name>][<name>]`` of the engine's requests; null counts
    as not given. With `each` a list is dealt out, one entry for each prompt of the body or for each answer; without it
    a list is refused. Where a body makes several requests, ``params[<provider's name>][INDEX]`` says which one this is,
    from 0. APIs check the type and nothing else. `meaning` is for the documents.
    """

    name: str
    kind: type[int | str | bool | float]
    each: bool = True
    meaning: str = ""


@dataclass(frozen=True, slots=True)
class Provider:
    """One implementation of one contract, under a name that the config can say.

    `factory` is the lazy name of a class that subclasses the contract and is built as ``Class(options, context)``;
    `config` the lazy name of the pydantic model of its options ("" where there are none to set).
    `provides` lists capabilities of the contract, `requires` what it needs of others. Among several candidates for
    ``use: auto`` the highest `rank` whose requirements are met and whose ``supports(context)`` has no objection wins;
    a negative rank is never chosen automatically. `contract_version` is the version it was written for.
    `conformance` is the lazy name of the test class that checks it (or several), a subclass of the contract's suite:
    `pegboard plugins check` runs that, and the bare suite where there is none. `body` are fields of request bodies that
    it reads in the `params` of requests; only providers of BODY_CONTRACTS get those.
    """

    contract: str
    name: str
    factory: str
    summary: str
    config: str = ""
    contract_version: str = "1.0"
    provides: frozenset[str] = frozenset()
    requires: tuple[Requirement, ...] = ()
    rank: int = 0
    conformance: str | tuple[str, ...] = ()
    body: tuple[BodyField, ...] = ()


@dataclass(frozen=True, slots=True)
class Plugin:
    """A named bundle of providers and hooks, as one distribution ships it.

    `hooks` are lazy names of classes whose instances are registered with pluggy when an engine is built.
    `extras` maps an importable module that a provider needs to the command that installs it, for error messages.
    `requires` names plugins without which this one cannot work. It may import their `api` modules, and of other
    plugins nothing.

    `config` is the lazy name of an `Options`, whose keys are those of the section ``plugins.NAME``. Where a record has
    `config` or `fields`, its hook classes are built as ``Class(options)``, and otherwise as ``Class()``. The config
    says ``plugins.NAME: false`` to leave the plugin out, and ``true``, or options, to have its hooks, fields and
    contracts. Without such a key a built-in plugin has them unless it says ``hooks_on=False``, and a plugin of another
    distribution has none: being installed does nothing.

    `fields` maps a section of the core to the lazy name of a `SectionFields` with further keys of it and their
    validators, ``fields={"server": "pegboard.plugins.x.options:ServerFields"}``; "" is the top level. The keys are
    checked, shown and documented as the section's own. Hook classes and providers of this plugin read them as
    ``options.section(ServerFields).profile_dir``; and ``configure(config)`` finds ``config.server`` to be one.

    `contracts` are further contracts, which then count as the core's do; `pegboard.core.interfaces.contracts` says
    more. What the plugin's hooks choose of them, they choose with the `choose` of what they are given.

    `other_servers` is a table in the plugin's package, ``package:file.yaml``: what vLLM and SGLang call its keys
    (`pegboard.toolkit.text.other_servers` says how it is written). Errors about unknown keys and flags name the key.
    """

    name: str
    version: str
    providers: tuple[Provider, ...] = ()
    hooks: tuple[str, ...] = ()
    api: str = API_VERSION
    summary: str = ""
    extras: Mapping[str, str] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    config: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    contracts: tuple[Contract, ...] = ()
    hooks_on: bool = True
    other_servers: str = ""
