"""States on their way through a model of transformers: hooks listen to what its layers are called with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from pegboard.core.interfaces.errors import Unsupported
from pegboard.plugins.model_transformers.trace import hidden_states, layer_name

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from pegboard.core.interfaces.forward import Taps
    from pegboard.plugins.model_transformers.head import Body
    from pegboard.plugins.model_transformers.trace import Trace

PROVIDER = "the model family transformers"


class _Entered(Exception):
    """Ends a forward pass where the first layer begins."""

    def __init__(self, states: torch.Tensor) -> None:
        super().__init__()
        self.states = states


def layers_of(model: torch.nn.Module, trace: Trace) -> list[torch.nn.Module]:
    """Return the layers of a model: the parts with a number of their own that each have one attention module. Where
    some keep states, these and those that look at each token by itself are layers, too. Nothing where it is not known
    which these are.
    """
    names = [layer_name(name) for name in trace.modules]
    if None in names or len(set(names)) < len(names):
        return []
    if not trace.states:
        return [model.get_submodule(name) for name in names if name is not None]
    names += [layer_name(module.name) for module in trace.states]
    lists = {None if name is None else name.rpartition(".")[0] for name in names}
    parent = lists.pop()
    return [] if lists or parent is None else list(model.get_submodule(parent).children())


class States:
    """What goes from layer to layer of `body`: the residual stream goes into each of `layers` and comes out."""

    def __init__(self, layers: Sequence[torch.nn.Module], body: Body, width: int) -> None:
        self._layers = layers
        self._body = body
        self._width = width
        self._placed: bool | None = None  # whether embeddings depend on positions; not known yet

    @contextmanager
    def shown(self, taps: Taps | None) -> Iterator[None]:
        """Show `taps` the states of a pass inside the block. Raise Unsupported where it is not known which modules are
        the layers, or where their states are of another width than the last ones.
        """
        handles = [] if taps is None else self._listen(taps)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _listen(self, taps: Taps) -> list[RemovableHandle]:
        if not self._layers:
            raise Unsupported(PROVIDER, "taps", "it is not known which modules are the layers of this model")

        def before(place: int) -> Callable[..., None]:
            return lambda _, arguments, named: self._note(taps, place, _entering(arguments, named))

        def behind(place: int) -> Callable[..., None]:
            return lambda _, __, output: self._note(taps, place, _leaving(output))

        last, wanted = len(self._layers), set(taps.places)
        handles = [
            layer.register_forward_pre_hook(before(place), with_kwargs=True)
            for place, layer in enumerate(self._layers)
            if place in wanted
        ]
        ends = {last: self._layers[-1], last + 1: self._body.module}
        return handles + [part.register_forward_hook(behind(place)) for place, part in ends.items() if place in wanted]

    def _note(self, taps: Taps, place: int, states: torch.Tensor) -> None:
        if states.shape[1] != self._width:
            raise Unsupported(PROVIDER, "taps", self._widths(states))
        taps.note(place, states.clone())  # a model may go on in the same memory

    def _widths(self, states: torch.Tensor) -> str:
        return f"states of {states.shape[1]} and {self._width} numbers in one model"

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings [n, hidden] of ids int64 [n], as they enter the first layer. Raise Unsupported where they
        depend on positions, and where states cannot be shown either.
        """
        if not self._layers:
            raise Unsupported(PROVIDER, "taps", "it is not known which modules are the layers of this model")
        if self._placed is None:
            twice = self._entered(ids.new_zeros(2), torch.arange(2, device=ids.device))
            self._placed = not torch.equal(twice[0], twice[1])
        if self._placed:
            raise Unsupported(PROVIDER, "taps", "the embeddings of this model depend on positions")
        found = self._entered(ids, torch.zeros_like(ids))
        if found.shape[1] != self._width:
            raise Unsupported(PROVIDER, "taps", self._widths(found))
        return found

    def _entered(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return what enters the first layer."""

        def end(_: object, arguments: tuple[object, ...], named: dict[str, object]) -> None:
            raise _Entered(_entering(arguments, named).clone())

        handle = self._layers[0].register_forward_pre_hook(end, with_kwargs=True)
        try:
            self._body(ids, positions)
        except _Entered as entered:
            return entered.states
        finally:
            handle.remove()
        raise AssertionError("the body has not called its first layer")


def _entering(arguments: tuple[object, ...], named: Mapping[str, object]) -> torch.Tensor:
    states = arguments[0] if arguments else named["hidden_states"]
    assert isinstance(states, torch.Tensor)
    return states[0]


def _leaving(output: object) -> torch.Tensor:
    """Return the states [tokens, hidden] in what a layer or a body returns."""
    return output[0] if isinstance(output, torch.Tensor) else hidden_states(output)[0]
