"""Early errors: what a config chooses is imported and looked at before anything slow begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pegboard.core.config.body_fields import declaring, taken_fields
from pegboard.core.config.requires import solve
from pegboard.core.interfaces.contract import Cardinality, Contract
from pegboard.core.interfaces.contracts import API
from pegboard.core.interfaces.errors import ConfigError, PluginError, Problem
from pegboard.core.registry.records import MissingExtra

if TYPE_CHECKING:
    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.registry.records import ProviderRecord


def on_api_side(contract: Contract) -> bool:
    """Return whether the API process of a server builds the providers; it imports no others."""
    return contract.api_side


def on_engine_side(contract: Contract) -> bool:
    return not contract.api_side


def import_chosen(resolved: ResolvedConfig, of: Callable[[Contract], bool] = lambda contract: True) -> None:
    """Import the classes that are certain to be needed, and check that an engine can be built with them.

    These are the providers that the config names, and for `auto` the first candidate; the others are imported only
    where those before them do not support the model or the device, and of optional contracts only where something
    needs one. `of` says of which contracts. Raises PluginError, or ConfigError where a library is missing; where
    several are broken, one error that lists them.
    """
    errors: list[PluginError | ConfigError] = []
    for name, records in resolved.candidates.items():
        contract = resolved.shape.contracts[name]
        if of(contract) and (name in resolved.named or not contract.optional):
            errors += _import_first(resolved, contract, records)
    if of(API) and not errors:
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
    resolved: ResolvedConfig, contract: Contract, records: tuple[ProviderRecord, ...]
) -> list[PluginError | ConfigError]:
    errors: list[PluginError | ConfigError] = []
    many = contract.cardinality is Cardinality.MANY
    for record in records:
        alone = {**resolved.candidates, contract.name: (record,)}
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
