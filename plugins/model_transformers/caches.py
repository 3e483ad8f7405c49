"""What transformers' modules take for a cache: one that notes which states they keep, and one that has states.

Both have that part of the interface of transformers' `Cache` which modules with recurrent states or convolutions call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Key = tuple[str, int]
"""Which of a module's states: its kind ("conv", "recurrent", "linear") and its number among those of that kind."""

CONV, RECURRENT, LINEAR = "conv", "recurrent", "linear"


class UnknownState(AttributeError):
    """A module asks its cache for something that is not known here."""


class CacheRecorder:
    """The empty cache of a run without weights. `found` says which states each module wants to keep: a tensor without
    memory for each, of the shape [1, ...] and type that it has. `calling` returns the module whose forward pass runs.
    """

    def __init__(self, calling: Callable[[], torch.nn.Module]) -> None:
        self.found: dict[torch.nn.Module, dict[Key, torch.Tensor]] = {}
        self.counting: set[torch.nn.Module] = set()
        """Modules that ask how many tokens came before theirs."""
        self._calling = calling

    def __getattr__(self, name: str) -> object:
        raise UnknownState(name)

    def _note(self, key: Key, state: torch.Tensor) -> None:
        self.found.setdefault(self._calling(), {})[key] = state

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_linear_cache(self, layer_idx: int) -> None:
        return None

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        self._note((CONV, state_idx), conv_states.new_empty(*conv_states.shape[:-1], width))
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0
    ) -> torch.Tensor:
        self._note((RECURRENT, state_idx), recurrent_states)
        return recurrent_states

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self._note((LINEAR, 0), linear_cache)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        self.counting.add(self._calling())
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


class PackedPositions:
    """The cache of modules that count the tokens before theirs, to know the positions of these: `before` int64 [tokens]
    is what has to be added to the places of packed tokens.
    """

    def __init__(self, before: torch.Tensor) -> None:
        self._before = before

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        return self._before

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states


class CacheView:
    """The states of some runs of tokens as one call of one module sees them: `states` [runs, ...] by key, those of the
    tokens before the call at first, and those after it at last.

    Modules write into the tensors that they get, which must therefore be theirs alone. Zeros stand for the state before
    the first token.
    """

    def __init__(self, states: dict[Key, torch.Tensor]) -> None:
        self.states = states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get((CONV, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get((RECURRENT, state_idx))

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self.states.get((LINEAR, 0))

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        """Keep the last inputs of a convolution; return all of them, those from before and the new ones."""
        before = self.states[CONV, state_idx]
        inputs = torch.cat([before, conv_states], -1)
        self.states[CONV, state_idx] = inputs[..., -before.shape[-1] :]
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0
    ) -> torch.Tensor:
        self.states[RECURRENT, state_idx] = recurrent_states
        return recurrent_states

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self.states[LINEAR, 0] = linear_cache

    def is_recording_past(self, layer_idx: int) -> bool:
        return False
