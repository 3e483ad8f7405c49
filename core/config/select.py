"""Choosing a provider where the config leaves it to the model and the device.

selection = Selection(resolved)
attention = selection.choose(ATTENTION, context).build(context)
processors = [one.build(context) for one in selection.choose_all(LOGITS_PROCESSOR, context)]
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from pegboard.core.config.compose import ResolvedConfig
from pegboard.core.config.requires import solve
from pegboard.core.config.shape import use_path
from pegboard.core.interfaces.contract import Contract, Ctx, T
from pegboard.core.interfaces.errors import ConfigError, Problem
from pegboard.core.interfaces.options import Options
from pegboard.core.registry.records import MissingExtra, ProviderRecord

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice(Generic[T, Ctx]):
    """A chosen provider, imported, with its options and the capabilities that it has with them.

    `reasons` says why others before it were passed over.
    """

    record: ProviderRecord
    cls: type[T]
    options: Options
    provides: frozenset[str] = frozenset()
    automatic: bool = False
    reasons: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.record.name

    def build(self, context: Ctx) -> T:
        """Return an instance, built from its options and the contract's context."""
        with self.record.told("building it"):
            return self.cls(self.options, context)

    def __str__(self) -> str:
        """Return a line for the log: ``attention: torch (pegboard 0.1.0), automatic; triton: no CUDA device``."""
        how = ", automatic" if self.automatic else ""
        return "; ".join((f"{self.record.provider.contract}: {self.record}{how}", *self.reasons))


class Selection:
    """The choices of one engine, made one after another while it is built.

    A choice narrows what is left for the contracts that it requires something of.
    """

    def __init__(self, resolved: ResolvedConfig) -> None:
        self.resolved = resolved
        self.choices: dict[str, tuple[Choice, ...]] = {}
        self._left = dict(resolved.candidates)
        self._missing: dict[str, list[str]] = {}
        self._reasons: dict[str, list[str]] = {name: list(why) for name, why in resolved.reasons.items()}

    def choose(
        self, contract: Contract[T, Ctx], context: Ctx, needs: Mapping[str, str] | None = None
    ) -> Choice[T, Ctx]:
        """Return the best provider that supports `context`, the same one each time it is asked for again.

        Candidates are imported and asked in rank order until one has no objection. Those that lack a capability of
        `needs` are passed over; its text says what needs it, and what to do. Raises ConfigError where none is
        left, with each one's objection, and PluginError where a plugin's own import fails.
        """
        name = contract.name
        if name not in self.choices:
            choice = self._pick(contract, context, needs or {})
            self.choices[name] = (choice,)
            log.info("%s", choice)
        return self.choices[name][0]

    def find(self, contract: Contract[T, Ctx], context: Ctx) -> Choice[T, Ctx] | None:
        """As `choose`; None where the config names no provider and none of them supports `context`."""
        if contract.name in self.resolved.named:
            return self.choose(contract, context)
        if contract.name not in self.choices:
            try:
                self.choose(contract, context)
            except ConfigError as error:
                log.debug("%s", error)
                self.choices[contract.name] = ()
        return next(iter(self.choices[contract.name]), None)

    def missing(self, contract: str) -> Sequence[str]:
        """Return which providers of a contract support the context but for a library that is not installed: their
        names, each with the command that installs it. After `choose` or `find`.
        """
        return self._missing.get(contract, ())

    def choose_all(self, contract: Contract[T, Ctx], context: Ctx) -> tuple[Choice[T, Ctx], ...]:
        """Return all providers of a list, in its order. Raises ConfigError where one does not support `context`."""
        if contract.name not in self.choices:
            chosen = []
            for index, record in enumerate(self._left[contract.name]):
                choice, objection = self._ask(contract, record, context)
                if choice is None:
                    path = f"{contract.config_path}[{index}]"
                    raise ConfigError(
                        Problem(path, f"{record} cannot be used: {objection}", self.resolved.origins.get(path, ""))
                    )
                chosen.append(choice)
            self.choices[contract.name] = tuple(chosen)
        return self.choices[contract.name]

    def summary(self) -> dict[str, str | list[str]]:
        """Return the names chosen so far, by contract: a list where the contract takes several."""
        lists = {one.name for one in self.resolved.shape.lists.values()}
        return {
            contract: [choice.name for choice in chosen] if contract in lists else chosen[0].name
            for contract, chosen in self.choices.items()
            if chosen or contract in lists
        }

    def _pick(self, contract: Contract[T, Ctx], context: Ctx, needs: Mapping[str, str]) -> Choice[T, Ctx]:
        reasons = self._reasons.setdefault(contract.name, [])
        for record in self._left[contract.name]:
            narrowed = solve({**self._left, contract.name: (record,)}, self.resolved.registry, self.resolved.provides)
            if narrowed.problems:
                reasons.append(f"{record.name}: {narrowed.problems[0].message}")
                continue
            if lacking := sorted(needs.keys() - self.resolved.provides(record)):
                reasons.append(f"{record.name}: it lacks the capability {lacking[0]}, {needs[lacking[0]]}")
                continue
            choice, objection = self._ask(contract, record, context, tuple(reasons))
            if choice is None:
                reasons.append(f"{record.name}: {objection}")
                continue
            self._left = narrowed.candidates
            for name, more in narrowed.reasons.items():
                self._reasons.setdefault(name, []).extend(more)
            return choice
        raise ConfigError(self._nobody(contract, reasons))

    def _ask(
        self, contract: Contract[T, Ctx], record: ProviderRecord, context: Ctx, reasons: tuple[str, ...] = ()
    ) -> tuple[Choice[T, Ctx] | None, str]:
        try:
            cls: type[T] = record.load()
        except MissingExtra as error:
            return None, str(error)
        options = self.resolved.options(record)
        try:
            with record.told("supports"):
                objection = _objection(cls.supports(options, context))
        except MissingExtra as error:
            self._missing.setdefault(contract.name, []).append(f"{record.name}: {error}")
            return None, str(error)
        if objection is not None:
            return None, objection
        automatic = contract.name not in self.resolved.named
        return Choice(record, cls, options, self.resolved.provides(record), automatic, reasons), ""

    def _nobody(self, contract: Contract, reasons: Sequence[str]) -> Problem:
        path = use_path(contract)
        origin = self.resolved.origins.get(path, "")
        if contract.name in self.resolved.named:
            record = self.resolved.candidates[contract.name][0]
            return Problem(path, f"{record} cannot be used: {reasons[-1].partition(': ')[2]}", origin)
        return Problem(
            path, f"no provider of {contract.name} can be used: {'; '.join(reasons) or 'none is installed'}", origin
        )


def _objection(answer: object) -> str | None:
    """Return what `supports` answered, if that is an answer."""
    if answer is None or isinstance(answer, str):
        return answer
    raise TypeError(f"it answered {answer!r}, and not None or the reason why not")
