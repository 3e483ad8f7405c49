"""The errors that users see. A message says what is wrong, with the value, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


class PegboardError(Exception):
    """Base of everything that Pegboard raises for its users. Shown without a traceback by the command line."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a config: the dotted `path` of the key, what is wrong, and the value's `origin`.

    `origin` names the file and line, the environment variable or the option that set the value; "" where none did.
    """

    path: str
    message: str
    origin: str = ""

    def __str__(self) -> str:
        text = f"{self.path}: {self.message}" if self.path else self.message
        return f"{text} [{self.origin}]" if self.origin else text


class ConfigError(PegboardError):
    """The config is wrong. `problems` holds everything that is wrong with it, not only the first."""

    def __init__(self, problems: Iterable[Problem] | Problem | str) -> None:
        if isinstance(problems, str):
            problems = Problem("", problems)
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__(str(self))

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        return "\n".join(
            [f"{len(self.problems)} problems in the config:", *(f"  {problem}" for problem in self.problems)]
        )

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class PluginError(PegboardError):
    """A plugin is broken, incompatible or in conflict with another. The message names its distribution and version.

    Where one is to blame, `plugin`, `distribution` and `version` are its own, `path` is the key of the config that
    chooses it, and `place` the file and line of its code that raised, as far as that is known.
    """

    def __init__(
        self,
        message: str,
        *,
        plugin: str = "",
        distribution: str = "",
        version: str = "",
        path: str = "",
        place: str = "",
    ) -> None:
        self.plugin = plugin
        self.distribution = distribution
        self.version = version
        self.path = path
        self.place = place
        super().__init__(message)


class ModelError(PegboardError):
    """The model cannot be found, read or served."""


class Unsupported(PegboardError):
    """An optional part of a contract was used that the provider does not declare in `provides`."""

    def __init__(self, provider: str, capability: str, detail: str = "") -> None:
        self.provider = provider
        self.capability = capability
        self.detail = detail
        super().__init__(f"{provider} does not provide {capability}" + (f": {detail}" if detail else ""))

    def __reduce__(self) -> tuple[type[Unsupported], tuple[str, str, str]]:
        return type(self), (self.provider, self.capability, self.detail)


class BadAnswer(ValueError):
    """A provider's answer breaks its contract. `by` is to blame, whichever object noticed; None: a client's data is."""

    def __init__(self, message: str, by: object) -> None:
        super().__init__(message)
        self.by = by


class Temporary(PegboardError):
    """What another start may mend: a port that is in use, a scheduler that dies again and again. Exit code 1."""


class OutOfMemory(PegboardError):
    """Memory that the config asks for is not there: on the device, on the host, or in the KV pool."""


class InvalidRequest(PegboardError):
    """A request that cannot be served as it stands; never harms another one.

    `status` is the HTTP status to answer with, `param` the offending field, `code` a short machine-readable word.
    `fields` are others that the message names. The engine calls fields by its own names; an API whose body has others
    raises `called(names)` instead.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str = "invalid_request",
        status: int = 400,
        fields: Sequence[str] = (),
    ) -> None:
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.fields = tuple(fields)
        super().__init__(message)

    def called(self, names: Mapping[str, str]) -> InvalidRequest:
        """Return this error with the names that a body has for fields of the engine: in `param`, and in the message
        where it first names `param`, and each of `fields`.

        A field of one word (`prompt`, `stop`) keeps it in the message, which may mean the word: "the prompt is empty".
        """
        message = self.message
        for name in (self.param or "", *self.fields):
            if "_" in name and name in names:
                message = message.replace(name, names[name], 1)
        param = names.get(self.param, self.param) if self.param else None
        return InvalidRequest(message, param=param, code=self.code, status=self.status)

    def __reduce__(self) -> tuple[object, tuple[str, str | None, str, int, tuple[str, ...]]]:
        return _invalid_request, (self.message, self.param, self.code, self.status, self.fields)


def _invalid_request(
    message: str, param: str | None, code: str, status: int, fields: tuple[str, ...]
) -> InvalidRequest:
    return InvalidRequest(message, param=param, code=code, status=status, fields=fields)
