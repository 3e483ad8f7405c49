"""Modules that keep states, run over the packed tokens of a batch: each request's tokens go on from its own state.

A module of transformers that is recurrent, or convolves over tokens, computes one sequence per row of its input. Here
its `forward` is replaced on the instance: it takes the rounds of `ForwardBatch.states` one after the other, those runs
of a round that are equally long as one batch, reads their states from the source slots, lets the module compute with a
`CacheView` of them, and writes what it keeps to the target slots. The module's own code is not changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pegboard.plugins.model_transformers import bridge
from pegboard.plugins.model_transformers.caches import CacheView, Key

if TYPE_CHECKING:
    from collections.abc import Callable

    from pegboard.core.interfaces.layers import StateSpec
    from pegboard.plugins.model_transformers.rounds import Segment

CACHE_NAMES = ("past_key_values", "cache_params")
"""What transformers calls the cache among a module's parameters."""


@dataclass(frozen=True, slots=True)
class StateModule:
    """A module, by its qualified name, and the states that it keeps. `by_token`: it reads them only when it is given
    one token, so it computes one after the other.
    """

    name: str
    states: tuple[tuple[Key, StateSpec], ...]
    by_token: bool


def keep_states(model: torch.nn.Module, modules: Sequence[StateModule]) -> None:
    """Have these modules of `model` compute by segments in a pass over a batch, and as they always do in any other."""
    for kept in modules:
        module = model.get_submodule(kept.name)
        module.__dict__["forward"] = InSegments(module.forward, kept)


class InSegments:
    """The `forward` of a module that keeps states."""

    def __init__(self, forward: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]], kept: StateModule) -> None:
        self._forward = forward
        self.kept = kept
        self._signature = inspect.signature(forward)
        self._cache = next(name for name in CACHE_NAMES if name in self._signature.parameters)

    def __call__(self, *args: object, **named: object) -> object:
        segments = bridge.segments_of_pass()
        if segments is None:
            return self._forward(*args, **named)
        call = self.bound(args, named)
        out: torch.Tensor | None = None
        others = 0
        for segment in segments:
            part, others = self._computed(call, segment)
            if segment.rows is None:
                out = part
                continue
            if out is None:
                out = part.new_empty(tokens_of(call), part.shape[-1])
            out.index_copy_(0, segment.rows, part)
        assert out is not None
        return (out.unsqueeze(0), *[None] * others) if others else out.unsqueeze(0)

    def bound(self, args: tuple[object, ...], named: Mapping[str, object]) -> inspect.BoundArguments:
        """Return the arguments of a call by the module's parameters."""
        return self._signature.bind(*args, **named)

    def _computed(self, call: inspect.BoundArguments, segment: Segment) -> tuple[torch.Tensor, int]:
        """Return the output [runs * length, width] of a segment, and how many results the module has beside it. Its
        states are written to the targets.
        """
        view = CacheView({key: _read(segment, state.name) for key, state in self.kept.states})
        runs, length = len(segment.sources), segment.length
        if self.kept.by_token and length > 1:
            rows = (
                torch.arange(tokens_of(call), device=segment.sources.device) if segment.rows is None else segment.rows
            )
            columns = rows.view(runs, length).unbind(1)
            outputs = [self.compute(call, view, column, runs, 1) for column in columns]
        else:
            outputs = [self.compute(call, view, segment.rows, runs, length)]
        for key, state in self.kept.states:
            memory = segment.memory[state.name]
            memory.index_copy_(0, segment.targets, view.states[key].to(memory.dtype))
        joined = torch.cat([results[0] for results in outputs], 1)
        return joined.view(-1, joined.shape[-1]), len(outputs[0]) - 1

    def compute(
        self, call: inspect.BoundArguments, view: CacheView, rows: torch.Tensor | None, runs: int, length: int
    ) -> tuple[torch.Tensor, ...]:
        """Return the results of the module for the tokens at `rows` int64 [runs * length] of a call, None: at all of
        them; the first is [runs, length, width].
        """
        tokens = tokens_of(call)

        def cut(value: object) -> object:
            if isinstance(value, tuple):
                return tuple(map(cut, value))
            if not isinstance(value, torch.Tensor) or value.shape[:2] != (1, tokens):
                return value
            taken = value[0] if rows is None else value[0].index_select(0, rows)
            return taken.view(runs, length, *value.shape[2:])

        part = self._signature.bind(*map(cut, call.args), **{name: cut(value) for name, value in call.kwargs.items()})
        part.arguments[self._cache] = view
        if "attention_mask" in self._signature.parameters:
            part.arguments["attention_mask"] = None
        output = self._forward(*part.args, **part.kwargs)
        return output if isinstance(output, tuple) else (output,)


def tokens_of(call: inspect.BoundArguments) -> int:
    """Return how many tokens a module is called with: its first argument is [1, tokens, width]."""
    hidden: torch.Tensor = call.args[0] if call.args else next(iter(call.kwargs.values()))
    return int(hidden.shape[1])


def _read(segment: Segment, name: str) -> torch.Tensor:
    """Return a copy of the states [runs, ...] at the sources, zeros where no token comes before."""
    states = segment.memory[name].index_select(0, segment.sources)
    if segment.fresh is None:
        return states
    # Filled, not multiplied: what a fresh run's source holds may be NaN.
    return states.masked_fill_(segment.fresh.view(-1, *[1] * (states.dim() - 1)), 0)
