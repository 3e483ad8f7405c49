"""Options of commands as dataclasses, so that commands share them and keep short signatures.

::

    @dataclass(frozen=True)
    class RunOptions:
        repeat: Annotated[int, typer.Option(min=1, help="Number of runs.")] = 1

    @with_option_groups
    def measure(*, url: Annotated[str, typer.Argument()], runs: RunOptions) -> None: ...

Typer sees the argument `url` and the option `--repeat`; `measure` gets a `RunOptions`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the fields of its dataclass parameters in their place, all of them keywords."""
    signature = inspect.signature(command, eval_str=True)
    groups = {one.name: one.annotation for one in signature.parameters.values() if _is_group(one.annotation)}

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        command(**values)

    parameters = [flat for one in signature.parameters.values() for flat in _flat(one)]
    run.__dict__["__signature__"] = signature.replace(parameters=parameters)
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _is_group(annotation: object) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def _flat(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    """Yield the parameters that stand for one: a group's fields, or itself."""
    kind = parameter.annotation
    if not _is_group(kind):
        yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        return
    types = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[field.name]
        )
