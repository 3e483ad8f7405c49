"""Whether decode steps of a loaded model can be recorded as graphs: a few are tried out, with no attention."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from pegboard.plugins.model_transformers import bridge
from pegboard.plugins.model_transformers.experts import is_experts, why_experts_wait
from pegboard.plugins.model_transformers.latent import size_of
from pegboard.plugins.model_transformers.rounds import segments_of
from pegboard.plugins.model_transformers.scaled_experts import why_scaled_wait
from pegboard.toolkit.graph_trial import LooksAtData, first_difference, operations_of
from pegboard.toolkit.model.states import decode_states, state_memory
from pegboard.toolkit.system.blame import in_words

if TYPE_CHECKING:
    from pegboard.core.interfaces.layers import LayerSpec, StateSpec
    from pegboard.plugins.model_transformers.rounds import Segment

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes logits of token ids and positions int64 [n]."""

_TRIED = (
    ((1, 2, 0), (0, 1, 3), (0, 1, 2), (1, 2, 0)),
    ((2, 2, 1), (5, 0, 2), (1, 2, 0), (2, 0, 1)),
    ((0, 1, 1), (1, 6, 4), (2, 1, 0), (0, 2, 1)),
)
"""Ids, positions, and slots that states are read from and written to. The first step makes what is made once; the
others are compared.
"""


def capture_objection(
    model: torch.nn.Module, layers: Mapping[torch.nn.Module, LayerSpec], step: Step, states: Sequence[StateSpec] = ()
) -> str | None:
    """Return why the decode steps of `model`, whose layers keep `states`, cannot be recorded, None where they can:
    which module looks at data, or which operation depends on the numbers. Attention returns zeros meanwhile.
    """
    if (reason := _waiting_experts(model)) is not None:
        return reason
    device = next(model.parameters()).device
    with torch.inference_mode():
        try:
            memory = _memory(states, device)
            runs = [partial(_run, step, layers, memory, *_on(device, numbers)) for numbers in _TRIED]
            runs[0]()
            first, second = map(operations_of, runs[1:])
        except LooksAtData as error:
            return f"{_place(error, model)}: {error}"
        except Exception as error:  # whatever code raises that needs what only a batch brings
            return f"{_place(error, model)}: a decode step cannot be tried: {in_words(error)}"
    difference = first_difference(first, second)
    return None if difference is None else f"two decode steps of one size differ: {difference}"


def _waiting_experts(model: torch.nn.Module) -> str | None:
    """Return None, or why the host waits for the device in the first module of experts for which it does."""
    for name, module in model.named_modules():
        reason = why_experts_wait(module) if is_experts(module) else why_scaled_wait(module)
        if reason is not None:
            return f"{name}: {reason}"
    return None


def _on(device: torch.device, numbers: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    return [torch.tensor(part, device=device) for part in numbers]


def _memory(states: Sequence[StateSpec], device: torch.device) -> Mapping[str, torch.Tensor]:
    """Return memory with a slot for each row of a trial."""
    memory = state_memory(states, len(_TRIED[0][0]) - 1, device)
    for tensor in memory.values():
        tensor.zero_()
    return memory


def _run(
    step: Step,
    layers: Mapping[torch.nn.Module, LayerSpec],
    memory: Mapping[str, torch.Tensor],
    ids: torch.Tensor,
    positions: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    """Run a decode step of one token per row."""
    segments = segments_of(decode_states(memory, sources, targets), len(ids))
    with bridge.handled_by(_NoAttention(layers, segments)):
        step(ids, positions)


class _NoAttention(bridge.Handler):
    """Returns zeros."""

    def __init__(self, layers: Mapping[torch.nn.Module, LayerSpec], segments: tuple[Segment, ...]) -> None:
        self._layers = layers
        self.segments = segments

    def attend(self, call: bridge.AttentionCall) -> torch.Tensor:
        layer = self._layers[call.module]
        width = size_of(call.module, "v_head_dim") if layer.latent else layer.v_head_dim
        return call.query.new_zeros(1, call.query.shape[2], layer.num_heads, width)


def _place(error: Exception, model: torch.nn.Module) -> str:
    """Return the name of the innermost module whose code has led to an error."""
    names = {module: name for name, module in model.named_modules()}
    found = "the model"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module):
            found = names.get(module) or found
    return found
