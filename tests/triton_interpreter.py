"""Makes Triton's interpreter faster, for the tests: its answers stay the same.

Left out is what has no effect:

- Whenever a kernel calls another function, all of `triton.language` is replaced once more. A launch has done so
  already, and undoes it at its end.
- Sums and products of integers are computed once more, in 64 bits, to find overflows. That the two differ is an error
  with the option `debug` alone, which the interpreter never has.
- A table of all types is made whenever one is looked up.

What another version of Triton calls otherwise stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any


class Scope:
    """What a launch replaced, with the functions' modules for which it did."""

    def __init__(self) -> None:
        self.modules: set[int] = set()
        self.replaced: Any = None

    def restore(self) -> None:
        self.modules.clear()
        self.replaced.restore()


def patch_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `patch`, which replaces the language for one function, such that a launch calls it once for each module
    that has functions. A function's call makes no use of the scope that it gets, only a launch does.
    """
    scope = Scope()

    def patch_if_new(function: Any) -> Scope:
        module = id(function.__globals__)
        if module not in scope.modules:
            replaced = patch(function)
            if not scope.modules:
                scope.replaced = replaced
            scope.modules.add(module)
        return scope

    return patch_if_new


def hasten(interpreter: ModuleType, language: ModuleType) -> None:
    """Make the module triton.runtime.interpreter faster."""
    names = vars(interpreter)
    if (patch := names.get("_patch_lang")) is not None:
        names["_patch_lang"] = patch_once(patch)
    builder: Any = names.get("interpreter_builder")
    options: Any = getattr(builder, "options", None)
    if hasattr(options, "sanitize_overflow") and not options.debug:
        builder.options = dataclasses.replace(options, sanitize_overflow=False)
    if (look_up := names.get("_get_np_dtype")) is not None:
        known = cache(look_up)
        address = known(language.uint64)

        def by_scalar(dtype: Any) -> Any:
            scalar = dtype.scalar
            return address if isinstance(scalar, language.pointer_type) else known(scalar)

        names["_get_np_dtype"] = by_scalar
