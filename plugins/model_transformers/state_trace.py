"""Which modules of a model keep states, found in a run without weights.

Whether a module reads its states when it is given several tokens is seen from its graph of operations, not from
numbers: Mamba 1 computes several tokens from an empty state, whatever its cache holds, and is run token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from pegboard.core.interfaces.layers import StateSpec
from pegboard.plugins.model_transformers.caches import CacheRecorder, CacheView, Key
from pegboard.plugins.model_transformers.configs import NotServable
from pegboard.plugins.model_transformers.segments import InSegments, StateModule, tokens_of

Call = tuple[tuple[object, ...], Mapping[str, object]]
"""Arguments of a module's forward pass."""


def state_modules(
    model: torch.nn.Module, recorder: CacheRecorder, call_of: Callable[[torch.nn.Module], Call]
) -> tuple[StateModule, ...]:
    """Return the modules that keep states, in the order in which they were called; `call_of` returns what one was
    called with. Raises NotServable where one of them keeps states that it does not read, and for modules that mix
    tokens without a state in transformers' cache.
    """
    names = {module: name for name, module in model.named_modules()}
    _refuse_other_state(model, recorder)
    by_token: dict[type, bool] = {}
    found = []
    for module, states in recorder.found.items():
        kind = type(module)
        if kind not in by_token:
            by_token[kind] = _goes_by_token(module, names[module], states, call_of(module))
        found.append(StateModule(names[module], _specs(names[module], states), by_token[kind]))
    return tuple(found)


def _specs(name: str, states: Mapping[Key, torch.Tensor]) -> tuple[tuple[Key, StateSpec], ...]:
    return tuple(
        (key, StateSpec(f"{name}.{key[0]}.{key[1]}", tuple(state.shape[1:]), str(state.dtype).removeprefix("torch.")))
        for key, state in states.items()
    )


def _refuse_other_state(model: torch.nn.Module, recorder: CacheRecorder) -> None:
    """Refuse convolutions over tokens and recurrent layers outside of modules whose states were seen."""
    seen = {part for module in recorder.found for part in module.modules()}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Conv1d | torch.nn.RNNBase) and module not in seen:
            raise NotServable(f"keeps a state that is not in transformers' cache, in {name} ({type(module).__name__})")
    if getattr(model, "_is_stateful", False) and not recorder.found:
        raise NotServable("keeps a state that is not in transformers' cache")


def _goes_by_token(module: torch.nn.Module, name: str, states: Mapping[Key, torch.Tensor], call: Call) -> bool:
    for by_token in (False, True):
        kept = StateModule(name, _specs(name, states), by_token)
        if not (unread := _unread(InSegments(module.forward, kept), states, call, by_token=by_token)):
            return by_token
    raise NotServable(f"does not read the state {name}.{unread[0][0]}.{unread[0][1]} that it keeps")


def _unread(forward: InSegments, states: Mapping[Key, torch.Tensor], call: Call, *, by_token: bool) -> list[Key]:
    """Return the states on which nothing depends that the module computes from all tokens of a call, or from one."""
    with torch.inference_mode(False), torch.enable_grad():
        arguments = forward.bound(*_outside_inference(call))
        given = {key: torch.empty_like(state, requires_grad=True) for key, state in states.items()}
        view = CacheView({key: state.clone() for key, state in given.items()})  # to be written into
        if by_token:
            first = torch.zeros(1, dtype=torch.long, device="meta")
            results = forward.compute(arguments, view, first, 1, 1)
        else:
            results = forward.compute(arguments, view, None, 1, tokens_of(arguments))
    leaves = _leaves(results[0])
    return [key for key, state in given.items() if id(state) not in leaves]


def _leaves(result: torch.Tensor) -> set[int]:
    """Return the ids of the tensors that need gradients and that a result was computed from.

    The graph is only walked. To compute gradients fails where a module writes into a tensor that it has read.
    """
    found: set[int] = set()
    seen = set()
    left = [result.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found.add(id(getattr(node, "variable", None)))
        left += [before for before, _ in node.next_functions]
    return found


def _outside_inference(call: Call) -> Call:
    """Return a call whose tensors can be part of a graph."""

    def copied(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(map(copied, value))
        return torch.empty_like(value) if isinstance(value, torch.Tensor) else value

    args, named = call
    return tuple(map(copied, args)), {name: copied(value) for name, value in named.items()}
