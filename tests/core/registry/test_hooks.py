"""Hooks: their order, what is refused, and the frozen calls."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from pegboard.core.interfaces.errors import PluginError
from pegboard.core.interfaces.hooks import LIFECYCLE_HOOKS, STAGE_HOOKS, STEP_HOOKS, hookimpl
from pegboard.core.interfaces.plugin import Plugin
from pegboard.core.registry.hooks import HOOK_NAMES, Hooks
from pegboard.core.registry.registry import Registry

CALLS: list[Any] = []


class First:
    @hookimpl
    def idle(self) -> None:
        CALLS.append("first")

    @hookimpl
    def after_forward(self, batch: Any, output: Any) -> None:
        CALLS.append(("first", batch, output))


class Second:
    @hookimpl
    def idle(self) -> None:
        CALLS.append("second")

    @hookimpl
    def after_forward(self, output: Any) -> None:
        CALLS.append(("second", output))


class Misspelt:
    @hookimpl
    def batch_scheduld(self) -> None: ...


class WrongArgument:
    @hookimpl
    def batch_scheduled(self, bacth: Any) -> None: ...


class Wrapper:
    @hookimpl(wrapper=True)
    def batch_scheduled(self) -> Any:
        return (yield)


class Raises:
    def __init__(self) -> None:
        raise RuntimeError("no disk")


def registry(*plugins: tuple[str, type]) -> Registry:
    sys.modules.setdefault("pegboard_test_hooks", sys.modules[__name__])
    return Registry.of(*(Plugin(name, "1", hooks=(f"pegboard_test_hooks:{cls.__name__}",)) for name, cls in plugins))


@pytest.fixture(autouse=True)
def calls() -> None:
    CALLS.clear()


def test_the_specifications_are_those_of_the_lists() -> None:
    assert (*LIFECYCLE_HOOKS, *STAGE_HOOKS, *STEP_HOOKS) == HOOK_NAMES


def test_calls_come_in_lock_order() -> None:
    hooks = Hooks.load(registry(("a", First), ("b", Second)))
    hooks.call.idle()
    assert CALLS == ["first", "second"]
    CALLS.clear()
    for hook in hooks.freeze("after_forward"):
        hook("batch", "output")
    assert CALLS == [("first", "batch", "output"), ("second", "output")]


def test_without_implementations_frozen_hooks_are_empty() -> None:
    hooks = Hooks.load(Registry.of())
    assert hooks.freeze("batch_scheduled") == ()
    hooks.call.idle()


def test_a_frozen_hook_that_takes_everything_is_the_method_itself() -> None:
    hooks, first = Hooks(), First()
    hooks.add(first)
    assert hooks.freeze("after_forward") == (first.after_forward,)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Misspelt, "plugin 'acme': unknown hook 'batch_scheduld' .* did you mean 'batch_scheduled'"),
        (WrongArgument, r"plugin 'acme': .*Argument\(s\) {'bacth'}"),
        (Raises, r"of plugin 'acme' \(pegboard 0\) cannot be built: RuntimeError: no disk"),
    ],
)
def test_what_is_wrong_names_the_plugin(cls: type, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        Hooks.load(registry(("acme", cls)))


def test_a_refused_object_leaves_nothing_behind() -> None:
    hooks = Hooks()
    with pytest.raises(PluginError):
        hooks.add(Misspelt())
    hooks.add(First())
    assert len(hooks.freeze("after_forward")) == 1


def test_a_step_hook_cannot_be_a_wrapper() -> None:
    hooks = Hooks()
    hooks.add(Wrapper(), name="wrapper")
    with pytest.raises(PluginError, match="wrapper: step hook 'batch_scheduled' cannot be a wrapper"):
        hooks.freeze("batch_scheduled")
