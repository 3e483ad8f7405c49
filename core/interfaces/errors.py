"""The errors that users see. A message says what is wrong, with the value, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
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
        return "\n".join([f"{len(self.problems)} problems in the config:", *(f"  {one}" for one in self.problems)])

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


class OutOfMemory(PegboardError):
    """Memory that the config asks for is not there: on the device, on the host, or in the KV pool."""


class InvalidRequest(PegboardError):
    """A request that cannot be served as it stands; never harms another one.

    `status` is the HTTP status to answer with, `param` the offending field, `code` a short machine-readable word.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "invalid_request", status: int = 400
    ) -> None:
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        super().__init__(message)

    def __reduce__(self) -> tuple[object, tuple[str, str | None, str, int]]:
        return _invalid_request, (self.message, self.param, self.code, self.status)


def _invalid_request(message: str, param: str | None, code: str, status: int) -> InvalidRequest:
    return InvalidRequest(message, param=param, code=code, status=status)
