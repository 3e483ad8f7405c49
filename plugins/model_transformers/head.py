"""A causal language model in two halves: the body, tokens to final hidden states, and the head, hidden states to
logits.

transformers has one forward pass for both, and what stands between the body and the logits (a scale, a soft cap, a
factor) is written differently in every model. So the model's own forward pass computes the head, with a stand-in
for the body that returns the hidden states it was given.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Body:
    """The body of a causal language model, run over packed tokens. One without attention may take no positions."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._placed = takes_positions(module)

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor) -> object:
        """Return what the module returns for ids and positions int64 [n], as one sequence."""
        named = {"position_ids": positions.unsqueeze(0)} if self._placed else {}
        return self.module(input_ids=ids.unsqueeze(0), use_cache=False, **named)


def takes_positions(body: torch.nn.Module) -> bool:
    """Return whether a body is told the positions of its tokens."""
    return "position_ids" in inspect.signature(body.forward).parameters


class _StandIn(torch.nn.Module):
    """In the body's place: returns `hidden` as the body would; everything else is the body's."""

    def __init__(self, body: torch.nn.Module, output_type: type) -> None:
        super().__init__()
        self.__dict__.update(
            body=body, output_type=output_type, hidden=None
        )  # unregistered: the body is not a part of it

    def forward(self, *_: object, **__: object) -> Any:
        hidden = self.__dict__["hidden"]
        output_type = self.__dict__["output_type"]
        return (hidden,) if output_type is tuple else output_type(last_hidden_state=hidden)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["body"], name)


class Head:
    """The head of `model`, a causal language model of transformers, whose body has the qualified name `body`."""

    def __init__(self, model: torch.nn.Module, body: str, output_type: type) -> None:
        self.model = model
        parent, _, self._name = body.rpartition(".")
        self._parent: torch.nn.Module = model.get_submodule(parent) if parent else model
        self.body: torch.nn.Module = model.get_submodule(body)
        self._stand_in = _StandIn(self.body, output_type)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocab] of hidden states [n, hidden], in the model's dtype. Not for two threads at a
        time.
        """
        ids = torch.zeros((1, hidden.shape[0]), dtype=torch.long, device=hidden.device)
        self._stand_in.__dict__["hidden"] = hidden.unsqueeze(0)
        try:
            with self._replaced():
                logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
        finally:
            self._stand_in.__dict__["hidden"] = None
        return logits[0]

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        modules = self._parent._modules
        modules[self._name] = self._stand_in
        try:
            yield
        finally:
            modules[self._name] = self.body
