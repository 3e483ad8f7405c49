"""For API plugins: refuses fields of other servers that would change the answer and are not supported."""

from __future__ import annotations

import enum
import functools
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import model_validator

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.http.bodies import RequestModel
from pegboard.toolkit.text.near_names import did_you_mean

logger = logging.getLogger(__name__)

MAX_REPORTED = 256
"""Most names of unknown fields that are logged: clients choose them."""
_reported: set[str] = set()
UNKNOWN_FIELD = "unknown_field"
"""Code of a refused field that nothing knows."""
_LONG = 64
"""Characters of an unknown name that are shown, and compared with others."""
_ALIKE = 0.85
"""From which likeness on a name is taken for a misspelt one."""
_MOST_GUESSED = 16
"""Unknown fields of a body that are compared with known ones: each takes 0.1 ms, and a body may have very many."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a field is refused: `instead` ends the message. Values that ask for nothing pass: null, those of `neutral`,
    which say what happens anyway, and false, 0 and what is empty, unless `false_asks`.
    """

    instead: str = ""
    neutral: tuple[Any, ...] = ()
    false_asks: bool = False

    def concerns(self, value: object) -> bool:
        """Return whether this value asks for something."""
        if value is None or not (value or self.false_asks):
            return False
        return value not in self.neutral


class Unknown(enum.Enum):
    """What becomes of a field that a body does not know."""

    LOGGED = "logged"
    """It is ignored, and the log says so, once of each name."""
    GUESSED = "guessed"
    """It is refused where its name is nearly that of a field, else logged."""
    REFUSED = "refused"


class RefusingModel(RequestModel):
    """A body that names the fields which it knows of and refuses, so that none of them is ignored in silence. Those of
    `harmless` are ignored; `unknown` says what becomes of others.
    """

    refused: ClassVar[Mapping[str, Refusal]] = {}
    harmless: ClassVar[Collection[str]] = ()
    unknown: ClassVar[Unknown] = Unknown.LOGGED

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        unknown = 0
        for name in data if isinstance(data, dict) else ():
            refusal = cls.refused.get(name)
            if refusal is not None and refusal.concerns(data[name]):
                text = f"{name} is not supported by this server{refusal.instead}"
                raise InvalidRequest(text, param=name, code="unsupported")
            if refusal is None and data[name] is not None and name not in _names(cls) and name not in cls.harmless:
                unknown += 1
                if cls.unknown is not Unknown.LOGGED and unknown <= _MOST_GUESSED:
                    cls._refuse_unknown(name[:_LONG])
                _report(name)
        return data

    @classmethod
    def _refuse_unknown(cls, name: str) -> None:
        hint = _hint(cls, name)
        if hint or cls.unknown is Unknown.REFUSED:
            text = f"{name} is not a field" + (f"; {hint}" if hint else "")
            raise InvalidRequest(text, param=name, code=UNKNOWN_FIELD)


@functools.lru_cache(1024)
def _hint(model: type[RefusingModel], name: str) -> str:
    """Return which names may have been meant. A client sends the same ones again."""
    return did_you_mean(name, _names(model), cutoff=_ALIKE if model.unknown is Unknown.GUESSED else 0.6)


@functools.cache
def _names(model: type[RefusingModel]) -> frozenset[str]:
    """Return the names that a body's fields have in JSON."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


def _report(name: str) -> None:
    """Log a field that is ignored, if its name is new and there have not been too many."""
    if len(_reported) < MAX_REPORTED and name not in _reported:
        _reported.add(name)
        logger.info("requests have a field that is not known here and has no effect: %r", name[:_LONG])
