"""For API plugins: refuses fields of other servers that would change the answer and are not supported."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import model_validator

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.http.bodies import RequestModel

logger = logging.getLogger(__name__)

MAX_REPORTED = 256
"""Most names of unknown fields that are logged: clients choose them."""
_reported: set[str] = set()


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


class RefusingModel(RequestModel):
    """A body that names the fields which it knows of and refuses, so that none of them is ignored in silence. Fields
    that it does not know are ignored, and the log says so, once of each name.
    """

    refused: ClassVar[Mapping[str, Refusal]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        for name in data if isinstance(data, dict) else ():
            refusal = cls.refused.get(name)
            if refusal is not None and refusal.concerns(data[name]):
                text = f"{name} is not supported by this server{refusal.instead}"
                raise InvalidRequest(text, param=name, code="unsupported")
            if refusal is None and not cls._knows(name):
                _report(name)
        return data

    @classmethod
    def _knows(cls, name: str) -> bool:
        """Return whether a body may have a field of this name; those that providers declare have it as an alias."""
        fields = cls.model_fields
        return name in fields or any(field.alias == name for field in fields.values())


def _report(name: str) -> None:
    """Log a field that is ignored, if its name is new and there have not been too many."""
    if len(_reported) < MAX_REPORTED and name not in _reported:
        _reported.add(name)
        logger.info("requests have a field that is not known here and has no effect: %r", name[:64])
