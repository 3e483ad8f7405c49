"""Culprits: which plugin raised, for the log, for the answers of failed requests and for metrics."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from pegboard.core.interfaces.errors import BadAnswer
from pegboard.toolkit.system.blame import describe, in_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pegboard.core.interfaces.plugin import Provider

T = TypeVar("T")


class Record(Protocol):
    """A provider, with the distribution that brings it."""

    @property
    def provider(self) -> Provider: ...
    @property
    def name(self) -> str: ...
    @property
    def origin(self) -> object: ...


class BadTokens(BadAnswer):
    """What are no tokens have been sampled."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """The provider that raised, with where it came from."""

    contract: str
    provider: str
    origin: str
    module: str

    def accuse(self, error: BaseException) -> str:
        """For the log: ``the sampler 'mine' (acme 1.0) failed: KeyError: 3 (.../mine.py:12)``."""
        return f"{self} failed: {describe(error, self.module)}"

    def tell(self, error: BaseException) -> str:
        """For clients, whom the server's files do not concern: the same without the place."""
        return f"{self} failed: {in_words(error)}"

    def __str__(self) -> str:
        return f"the {self.contract.replace('_', ' ')} {self.provider!r} ({self.origin})"


class Culprits:
    """The plugins that a scheduler runs. Looks for one only when something has been raised, so it costs nothing."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        """How often each provider failed, by contract and name; those that have guards of their own apart."""
        self._known: dict[int, tuple[object, Culprit]] = {}

    def know(self, record: Record, made: T) -> T:
        """Remember that this provider built `made`, and return it."""
        culprit = Culprit(record.provider.contract, record.name, str(record.origin), type(made).__module__)
        self._known[id(made)] = (made, culprit)
        return made

    def know_hooks(self, plugin: str, origin: str, made: object) -> None:
        """Remember the plugin whose hooks are the methods of `made`."""
        self._known[id(made)] = (made, Culprit("hooks", plugin, origin, type(made).__module__))

    def know_part(self, kind: str, name: str, origin: str, made: object) -> None:
        """Remember a stage or a device part, `origin` being its plugin's."""
        self._known[id(made)] = (made, Culprit(kind, name, origin, type(made).__module__))

    def know_gate(self, name: str, stage: object, gate: object) -> None:
        """Remember the gate that a stage brings, under the stage's name; nothing where nothing is known of it."""
        if (brings := self._find(stage)) is not None:
            self._known[id(gate)] = (gate, Culprit("admission_gate", name, brings.origin, type(gate).__module__))

    def name(self, made: object) -> str:
        """Return the provider's name, or the class's where nothing is known of it."""
        culprit = self._find(made)
        return type(made).__name__ if culprit is None else culprit.provider

    def of(self, error: BaseException) -> Culprit | None:
        """Return whose method was at work, the innermost one of several; None where none of the known was."""
        for one in _causes(error):
            if isinstance(one, BadAnswer):
                return self._find(one.by)
            found = None
            for frame, _ in traceback.walk_tb(one.__traceback__):
                code = frame.f_code
                own = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
                found = self._find(own) or found
            if found is not None:
                return found
        return None

    def known(self, made: object) -> Culprit | None:
        """Return what is known of a provider's object, None where it is not one of them."""
        return self._find(made)

    def count(self, culprit: Culprit | None) -> None:
        """One more failure of it."""
        if culprit is not None:
            self.counts[culprit.contract, culprit.provider] += 1

    def all_counts(self, *guarded: tuple[str, str, int]) -> dict[str, dict[str, int]]:
        """Failures by contract and provider, with those that guards have counted."""
        found: dict[str, dict[str, int]] = {}
        for contract, name, count in (*((*key, count) for key, count in self.counts.items()), *guarded):
            if count:
                by_name = found.setdefault(contract, {})
                by_name[name] = by_name.get(name, 0) + count
        return found

    def _find(self, made: object) -> Culprit | None:
        known = self._known.get(id(made))
        return known[1] if known is not None and known[0] is made else None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error's causes, the first one first, and the error itself last."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__
    yield from reversed(chain)
