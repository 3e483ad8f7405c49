"""What an engine must be able to do for its speculator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import ConfigError, Problem
from pegboard.plugins.speculation.api import DeviceSpeculator

if TYPE_CHECKING:
    from pegboard.core.interfaces.choosing import NamedProvider
    from pegboard.core.interfaces.layers import ModelSpec
    from pegboard.plugins.speculation.api import Speculator

KEY = "speculation.use"


def on_device(speculator: Speculator) -> DeviceSpeculator | None:
    """Return the speculator itself where it drafts on the device."""
    return speculator if isinstance(speculator, DeviceSpeculator) and speculator.max_nodes > 1 else None


def check(speculator: Speculator, choices: Mapping[str, Sequence[NamedProvider]], spec: ModelSpec) -> None:
    """Raise ConfigError for a speculator whose drafts cannot be made or verified by the chosen providers."""
    if len(spec.kv_groups) > 1:
        text = "speculation excludes memory.window_pages: a window's pages may be gone when drafts are rejected"
        raise ConfigError(Problem(KEY, f"{text}; use none, or set that to false"))
    (choice,), (runner,), (attention,) = (choices[name] for name in ("speculator", "runner", "attention"))
    name, trees = choice.name, "branches" in choice.provides
    if spec.states and (trees or on_device(speculator) is not None):
        text = "whose layers keep states; ngram does, whose drafts are chains"
        raise ConfigError(Problem(KEY, f"{name!r} does not draft for {spec.architecture}, {text}"))
    if trees and "own_attention" in runner.provides:
        _need("runner", runner, "tree_mask", f"{name!r} proposes trees, which", "verify")
    elif trees:
        _need("attention", attention, "tree_mask", f"{name!r} proposes trees, which", "verify")
    if on_device(speculator) is None:
        return
    _need("runner", runner, "taps", f"{name!r} reads the model's states, which", "show")
    _need("runner", runner, "ends", f"{name!r} uses the model's embedding and head, which", "lend")
    if "own_weights" not in runner.provides:
        (family,) = choices["model_family"]
        _need("model", family, "taps", f"{name!r} reads the model's states, which", "show")
    if trees:
        _need("attention", attention, "tree_mask", f"{name!r} drafts in trees, which", "attend over")


def _need(kind: str, by: NamedProvider, capability: str, start: str, what: str) -> None:
    """Raise ConfigError where a provider lacks a capability."""
    if capability not in by.provides:
        text = f"the speculator {start} the {kind} {by.name!r} cannot {what} (it lacks the capability {capability})"
        raise ConfigError(Problem(KEY, f"{text}; choose another {kind}.use"))
