"""Early errors: what a config chooses is imported and looked at before anything slow begins."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from pegboard.core.config.body_fields import declaring, taken_fields
from pegboard.core.config.requires import solve
from pegboard.core.interfaces.contracts import CONTRACTS, Cardinality
from pegboard.core.interfaces.errors import ConfigError, PluginError, Problem
from pegboard.core.registry.records import MissingExtra

if TYPE_CHECKING:
    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.registry.records import ProviderRecord

API_SIDE = frozenset({"api", "media_processor", "session_store", "tool_parser", "reasoning_parser"})
"""Contracts whose providers the API process of a server builds; it imports no others, which bring torch."""
ENGINE_SIDE = frozenset(CONTRACTS) - API_SIDE
_NAMED_ONLY = frozenset({"host_pool", "kv_transfer", "media_encoder", "media_processor", "pooler"})
"""Contracts that not every engine needs a provider of: which one does is known by its model, its prefix cache or
its gates."""


def import_chosen(resolved: ResolvedConfig, contracts: Collection[str] = frozenset(CONTRACTS)) -> None:
    """Import the classes that are certain to be needed, and check that an engine can be built with them.

    These are the providers that the config names, and for `auto` the first candidate; the others are imported only
    where those before them do not support the model or the device, and of some contracts only where the runner needs
    one. Raises PluginError, or ConfigError where a library is missing; where several are broken, one error that lists
    them.
    """
    errors: list[PluginError | ConfigError] = []
    for contract, records in resolved.candidates.items():
        if contract in contracts and (contract in resolved.named or contract not in _NAMED_ONLY):
            errors += _import_first(resolved, contract, records)
    if "api" in contracts and not errors:
        errors += _taken_fields(resolved)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        problems = [problem for error in errors for problem in problems_of(error)]
        raise PluginError("\n".join(map(str, errors))) from ConfigError(problems)


def problems_of(error: PluginError | ConfigError) -> tuple[Problem, ...]:
    """Return what is wrong, one by one."""
    if isinstance(error, ConfigError):
        return error.problems
    if isinstance(error.__cause__, ConfigError):
        return error.__cause__.problems
    return (Problem(error.path, str(error).removeprefix(f"{error.path}: ")),)


def _import_first(
    resolved: ResolvedConfig, contract: str, records: tuple[ProviderRecord, ...]
) -> list[PluginError | ConfigError]:
    errors: list[PluginError | ConfigError] = []
    many = CONTRACTS[contract].cardinality is Cardinality.MANY
    for record in records:
        alone = {**resolved.candidates, contract: (record,)}
        if not many and solve(alone, resolved.registry, resolved.provides).problems:
            continue
        try:
            record.load()
            record.options_model()
        except MissingExtra as error:
            if not many and len(records) > 1:
                continue
            errors.append(ConfigError(_missing(resolved, record, error)))
        except PluginError as error:
            errors.append(error)
        if not many:
            break
    return errors


def _taken_fields(resolved: ResolvedConfig) -> list[PluginError | ConfigError]:
    problems = list(taken_fields(declaring(resolved.candidates), resolved.candidates.get("api", ())))
    return [ConfigError(problems)] if problems else []


def _missing(resolved: ResolvedConfig, record: ProviderRecord, error: MissingExtra) -> Problem:
    return Problem(record.key, f"{record} cannot be used: {error}", resolved.origins.get(record.key, ""))
