"""Solving `requires`: which provider needs what of which other, before anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from pegboard.core.config.shape import use_path
from pegboard.core.interfaces.contract import Cardinality
from pegboard.core.interfaces.errors import PluginError, Problem
from pegboard.core.interfaces.plugin import Requirement
from pegboard.core.registry.records import ProviderRecord
from pegboard.core.registry.registry import Registry

Candidates = Mapping[str, tuple[ProviderRecord, ...]]
Provides = Callable[[ProviderRecord], frozenset[str]]
"""The capabilities of a provider with the options that it would get."""


@dataclass
class Solution:
    """What is left of the candidates, why others went (per contract), and what cannot be met."""

    candidates: dict[str, tuple[ProviderRecord, ...]]
    provides: Provides
    registry: Registry
    reasons: dict[str, list[str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def drop(self, contract: str, records: list[ProviderRecord], reason: str) -> None:
        self.candidates[contract] = tuple(record for record in self.candidates[contract] if record not in records)
        self.reasons.setdefault(contract, []).extend(f"{record.name}: {reason}" for record in records)


def solve(candidates: Candidates, registry: Registry, provides: Provides) -> Solution:
    """Narrow the candidates until every requirement of what is certain is met, or say why it cannot be.

    A provider that is certain (named, the only one left, or in a list) narrows what it requires; a mere candidate whose
    requirements cannot be met is dropped itself. A contract that is missing from `candidates` is left alone: the config
    is wrong about it and says so elsewhere.
    """
    solution = Solution(dict(candidates), provides, registry)
    reported: set[tuple[ProviderRecord, Requirement]] = set()
    while True:
        step = next(_open(solution, reported), None)
        if step is None:
            return solution
        record, requirement = step
        _settle(solution, record, requirement, reported)


def part_params(solution: Solution) -> None:
    """See that no sampler shares its name with a logits processor where both take parameters from requests: these come
    under the name, and each would get the other's.
    """

    def with_params(contract: str) -> list[ProviderRecord]:
        wanted = Requirement(contract, "params")
        return [
            record for record in solution.candidates.get(contract, ()) if _could_meet(record, wanted, solution.provides)
        ]

    others = {one.name: one for one in with_params("logits_processor")}
    clashing = [one for one in with_params("sampler") if one.name in others]
    if clashing and len(clashing) < len(solution.candidates["sampler"]):
        solution.drop("sampler", clashing, "requests would bring its parameters under the name of a logits processor")
    elif clashing:
        record, other = clashing[0], others[clashing[0].name]
        text = (
            f"{_quoted(record)} and the logits processor {_quoted(other)} both take parameters from requests, which "
            "bring them under that name, so each would get the other's: use one of the two"
        )
        solution.problems.append(Problem(record.key, text))


def _certain(record: ProviderRecord, candidates: Candidates) -> bool:
    contract = record.contract
    return contract.cardinality is Cardinality.MANY or len(candidates[contract.name]) == 1


def _open(
    solution: Solution, reported: set[tuple[ProviderRecord, Requirement]]
) -> Iterator[tuple[ProviderRecord, Requirement]]:
    """Yield requirements that would still change something."""
    for records in solution.candidates.values():
        for record in records:
            for requirement in record.provider.requires:
                targets = solution.candidates.get(requirement.contract)
                if targets is None or (record, requirement) in reported:
                    continue
                having = _having(solution, requirement)
                targets = solution.candidates[requirement.contract]
                many = solution.registry.contract(requirement.contract).cardinality is Cardinality.MANY
                if not having or (len(having) < len(targets) and not many and _certain(record, solution.candidates)):
                    yield record, requirement


def _settle(
    solution: Solution,
    record: ProviderRecord,
    requirement: Requirement,
    reported: set[tuple[ProviderRecord, Requirement]],
) -> None:
    having = _having(solution, requirement)
    targets = solution.candidates[requirement.contract]
    if having:
        lacking = [one for one in targets if one not in having]
        solution.drop(requirement.contract, lacking, f"{record.name} needs {_wanted(requirement)}")
    elif _certain(record, solution.candidates):
        reported.add((record, requirement))
        solution.problems.append(_problem(solution, record, requirement, targets))
    else:
        solution.drop(record.contract.name, [record], f"it needs {_wanted(requirement)}, which nothing here provides")


def _having(solution: Solution, requirement: Requirement) -> list[ProviderRecord]:
    """Return the candidates that meet it. One that cannot say what it provides is dropped where others are left."""
    having = []
    for record in solution.candidates[requirement.contract]:
        try:
            if _meets(record, requirement, solution.provides):
                having.append(record)
        except PluginError as error:
            if _certain(record, solution.candidates):
                raise
            solution.drop(requirement.contract, [record], str(error))
    return having


def _meets(record: ProviderRecord, requirement: Requirement, provides: Provides) -> bool:
    return requirement.capability is None or requirement.capability in provides(record)


def _could_meet(record: ProviderRecord, requirement: Requirement, provides: Provides) -> bool:
    """Of one that the config does not choose: by its record where its code fails."""
    try:
        return not record.problem and _meets(record, requirement, provides)
    except PluginError:
        return requirement.capability in record.provides


def _wanted(requirement: Requirement) -> str:
    return f"{requirement.contract}.{requirement.capability}" if requirement.capability else requirement.contract


def _problem(
    solution: Solution, record: ProviderRecord, requirement: Requirement, targets: tuple[ProviderRecord, ...]
) -> Problem:
    """Name the provider that needs it, those that lack it, and those that have it."""
    place = use_path(solution.registry.contract(requirement.contract))
    why = f" because {requirement.why}" if requirement.why else ""
    lacking = " and ".join(_quoted(one) for one in targets)
    chosen = f"but {place} is {lacking}, without it" if targets else f"but {place} names none"
    remedy = _remedy(requirement, targets, place, solution.registry, solution.provides)
    return Problem(
        use_path(record.contract), f"{_quoted(record)} needs {_wanted(requirement)}{why}, {chosen}; {remedy}"
    )


def _remedy(
    requirement: Requirement,
    targets: tuple[ProviderRecord, ...],
    place: str,
    registry: Registry,
    provides: Provides,
) -> str:
    wanted = requirement.capability
    narrowed = [record for record in targets if wanted in record.provides]
    if narrowed:
        return f"the options of {' and '.join(_quoted(one) for one in narrowed)} switch it off"
    having = [
        record for record in registry.providers(requirement.contract) if _could_meet(record, requirement, provides)
    ]
    return (
        f"{place} can be {', '.join(str(record) for record in having)}" if having else "nothing installed provides it"
    )


def _quoted(record: ProviderRecord) -> str:
    return f"{record.name!r} ({record.origin})"
