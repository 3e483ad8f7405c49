"""Makes Triton's interpreter faster, for the tests: its answers stay the same.

Left out is what has no effect:

- Whenever a kernel calls another function, all of `triton.language` is replaced once more. A launch has done so
  already, and undoes it at its end.
- Sums and products of integers are computed once more, in 64 bits, to find overflows. That the two differ is an error
  with the option `debug` alone, which the interpreter never has.
- A table of all types is made whenever one is looked up.
- What follows from a shape is computed once more for each type and each value that has it.
- Types and shapes that are the same object are compared in full, and two types' common type is found anew each time.
- Each call of an operation copies its arguments by name, and passes a check that it is inside a kernel.

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


def share_shapes(core: Any) -> None:
    """Let all types and values of a shape have the same objects for it, which nothing changes."""

    @cache
    def of(shape: tuple[int, ...]) -> tuple[Any, int, str, Any, Any]:
        made = block(core.float32, shape)
        one = value(None, made)
        return made.shape, made.numel, str(made.shape), one.shape, one.numel

    def block(element: Any, shape: Any) -> Any:
        made = object.__new__(core.block_type)
        make_block(made, element, list(shape))
        return made

    def value(handle: Any, kind: Any) -> Any:
        made = object.__new__(core.tensor)
        make_value(made, handle, kind)
        return made

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if not sizes:
            make_block(self, element_ty, shape)
        self.shape, self.numel, text, *_ = of(sizes)
        self.element_ty, self.name = element_ty, f"<{text}, {element_ty}>"

    def init_value(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = of(tuple(kind.shape.values))[3:] if kind.is_block() else (no_shape, one)

    make_block, make_value = core.block_type.__init__, core.tensor.__init__
    scalar = value(None, core.float32)
    no_shape, one = scalar.shape, scalar.numel
    core.block_type.__init__, core.tensor.__init__ = init_block, init_value


def look_first(semantic: Any) -> None:
    """Let the class of `semantic` see before anything else that two operands need no conversion."""
    kind = type(semantic)
    broadcast, cast = kind.broadcast_impl_value, kind.cast
    common = cache(semantic.computation_type_impl)

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape is right.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def cast_if_needed(self: Any, value: Any, dtype: Any, *more: Any, **named: Any) -> Any:
        return value if value.dtype is dtype else cast(self, value, dtype, *more, **named)

    kind.broadcast_impl_value, kind.cast = broadcast_impl_value, cast_if_needed
    kind.computation_type_impl = staticmethod(common)


def call_at_once(core: Any, semantic: Any) -> Callable[..., None]:
    """Return what replaces an operation of the language by the interpreter's, as `_patch_attr` does."""
    checked = core.builtin(lambda: None).__code__

    def replace(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        # What checks the arguments calls this.
        operation = member.__wrapped__ if getattr(member, "__code__", None) is checked else member

        def called(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return operation(*args, **kwargs)

        scope.set_attr(owner, name, called)

    return replace


def hasten(interpreter: ModuleType, language: ModuleType) -> None:
    """Make the module triton.runtime.interpreter faster."""
    names = vars(interpreter)
    core: Any = getattr(language, "core", None)
    semantic: Any = names.get("interpreter_semantic")
    if all(hasattr(core, name) for name in ("block_type", "tensor", "builtin")):
        share_shapes(core)
        if "_patch_attr" in names and semantic is not None:
            names["_patch_attr"] = call_at_once(core, semantic)
    if all(hasattr(semantic, name) for name in ("broadcast_impl_value", "cast", "computation_type_impl")):
        look_first(semantic)
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
