"""Where transformers calls us: one attention function that hands q, k and v to our backend, and one that only records.

What a call needs beyond its tensors travels by context variable and not by keyword arguments, because some models drop
keywords that they do not know on the way to their attention layers.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pegboard.plugins.model_transformers.latent import absorbed, values_of
from pegboard.toolkit.model.hadamard import transformed

if TYPE_CHECKING:
    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.core.interfaces.layers import LayerSpec
    from pegboard.plugins.model_transformers.rounds import Segment
    from pegboard.toolkit.model.linear import Site

PAGED = "pegboard_paged"
"""The attention of a served model. No mask function stands under this name, so transformers builds no mask at all."""

TRACED = "pegboard_traced"
"""The attention of a model without weights, under the recorder. Here a mask function stands, to see which masks it
asks for.
"""

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""transformers' mask functions: (batch, head, query position, key position) -> whether the key is seen."""


@dataclass(slots=True)
class AttentionCall:
    """One call of an attention function, as transformers makes it."""

    module: torch.nn.Module
    query: torch.Tensor
    """[1, heads, tokens, head_dim]; `key` and `value` likewise, with their own heads."""
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    arguments: Mapping[str, Any]


class Handler(abc.ABC):
    """Answers the attention calls of the forward pass that runs in this context. Modules that keep states compute its
    tokens in `segments`; None: as they do in a pass of the model's own attention.
    """

    segments: tuple[Segment, ...] | None = None

    @abc.abstractmethod
    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the attention output [1, tokens, heads, v_head_dim]."""


class PagedAttention(Handler):
    """Serves the calls of one batch: `layers` says which of our layers a module of transformers is."""

    def __init__(
        self,
        batch: ForwardBatch,
        layers: Mapping[torch.nn.Module, LayerSpec],
        segments: tuple[Segment, ...] = (),
    ) -> None:
        self.batch = batch
        self.layers = layers
        self.segments = segments

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layer, batch = self.layers[call.module], self.batch
        q, k = _packed(call.query), _packed(call.key)
        if layer.latent:
            q, v = absorbed(call.module, q), k[..., : layer.v_head_dim]
        else:
            (q, k), v = transformed(q, k, layer, batch.kv_pool), _packed(call.value)
        out = batch.attn_backend.forward(q, k, v, layer, batch, sinks=call.arguments.get("s_aux"))
        if layer.latent:
            out = values_of(call.module, out)
        return out.unsqueeze(0)


def _packed(heads_first: torch.Tensor) -> torch.Tensor:
    """[1, heads, tokens, dim] as [tokens, heads, dim], the heads of a token one after another."""
    found = heads_first[0].transpose(0, 1)
    dense = found.stride(2) == 1 and found.stride(1) == found.shape[2]
    return found if dense else found.contiguous()


_HANDLER: ContextVar[Handler] = ContextVar("pegboard_transformers_handler")


def is_handled() -> bool:
    """Return whether a `Handler` answers the attention calls of this context."""
    return _HANDLER.get(None) is not None


@contextmanager
def handled_by(handler: Handler) -> Iterator[None]:
    """Attention calls inside the block go to `handler`."""
    token = _HANDLER.set(handler)
    try:
        yield
    finally:
        _HANDLER.reset(token)


def batch_of_pass() -> ForwardBatch | None:
    """Return the batch whose pass this is, None in a pass of the model's own attention."""
    handler = _HANDLER.get(None)
    return handler.batch if isinstance(handler, PagedAttention) else None


def add_to(site: Site, x: torch.Tensor, out: torch.Tensor) -> None:
    """Have the batch of this pass add to a product `out` [1, tokens, rows] of x, in place, if it adds to products.
    Raise RuntimeError for a product of some of its tokens.
    """
    batch = batch_of_pass()
    if batch is None or batch.additions is None:
        return
    rows = out.view(-1, out.shape[-1])
    if rows.shape[0] != batch.num_tokens:
        name = site.parts[0].name
        raise RuntimeError(f"{name} is called with {rows.shape[0]} rows, not with the batch's {batch.num_tokens}")
    batch.additions.add(site.number, x.reshape(-1, x.shape[-1]), rows)


def segments_of_pass() -> tuple[Segment, ...] | None:
    """Return in which segments modules with states compute, None in a pass of the model's own attention."""
    handler = _HANDLER.get(None)
    return None if handler is None else handler.segments


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Return the signature that transformers calls; the second result stands for attention weights."""
    return _HANDLER.get().attend(AttentionCall(module, query, key, value, attention_mask, arguments)), None


_MASKS: ContextVar[dict[int, tuple[torch.Tensor, MaskFunction]]] = ContextVar("pegboard_transformers_masks")


@contextmanager
def masks_recorded() -> Iterator[dict[int, tuple[torch.Tensor, MaskFunction]]]:
    """Masks asked for under `TRACED` inside the block: id of the stand-in that was given out -> it and its mask
    function.
    """
    masks: dict[int, tuple[torch.Tensor, MaskFunction]] = {}
    token = _MASKS.set(masks)
    try:
        yield masks
    finally:
        _MASKS.reset(token)


def _mask(
    batch_size: int = 1, q_length: int = 0, kv_length: int = 0, *, mask_function: MaskFunction, **_: object
) -> torch.Tensor:
    """Return a stand-in without memory, of the shape of the mask that was asked for."""
    mask = torch.empty((batch_size, 1, q_length, kv_length), dtype=torch.bool, device="meta")
    _MASKS.get()[id(mask)] = (mask, mask_function)
    return mask


def register() -> None:
    """Make both attention functions known to transformers. Calling it again changes nothing."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(PAGED, _attention)
    AttentionInterface.register(TRACED, _attention)
    AttentionMaskInterface.register(TRACED, _mask)
