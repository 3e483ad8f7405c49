"""A loaded model of transformers as a Network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.model_family import Network
from pegboard.plugins.model_transformers import bridge
from pegboard.plugins.model_transformers.caches import PackedPositions
from pegboard.plugins.model_transformers.capture import capture_objection
from pegboard.plugins.model_transformers.experts import EXPERTS, keeps_codes
from pegboard.plugins.model_transformers.head import Body, Head
from pegboard.plugins.model_transformers.latent import keep_latents
from pegboard.plugins.model_transformers.replaced import Replaced
from pegboard.plugins.model_transformers.rounds import Segment, segments_of
from pegboard.plugins.model_transformers.scaled_experts import take_scaled_experts
from pegboard.plugins.model_transformers.segments import CACHE_NAMES, keep_states
from pegboard.plugins.model_transformers.sites import find_sites
from pegboard.plugins.model_transformers.states import PROVIDER, States, layers_of
from pegboard.plugins.model_transformers.trace import hidden_states
from pegboard.toolkit.model.packed import why_not_packed

if TYPE_CHECKING:
    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.core.interfaces.layers import LayerSpec
    from pegboard.core.interfaces.weights import WeightStore
    from pegboard.plugins.model_transformers.merged import CodedLinears
    from pegboard.plugins.model_transformers.trace import Trace


_Arguments = tuple[tuple[object, ...], dict[str, object]]


class TransformersNetwork(Network):
    """Runs the body of `model` over packed requests as one sequence [1, tokens]; positions tell the requests'
    tokens apart, and attention, which alone looks at other tokens, is ours. It does not have the capability `overlay`.
    """

    def __init__(
        self,
        model: Any,
        trace: Trace,
        services: Mapping[str, object] = MappingProxyType({}),
        coded: CodedLinears | None = None,
    ) -> None:
        self.model = model
        self.store: WeightStore | str = "the family has not said how"
        """Its weights, to be replaced, or why they cannot be."""
        keep_latents(model, bridge.is_handled)
        keep_states(model, trace.states)
        take_scaled_experts(model, bridge.is_handled)
        for name in trace.counting:
            model.get_submodule(name).register_forward_pre_hook(_place, with_kwargs=True)
        self._kept = tuple(state for module in trace.states for _, state in module.states)
        self._head = Head(model, trace.body, trace.body_output)
        self._layers: dict[torch.nn.Module, LayerSpec] = {
            model.get_submodule(name): layer for name, layer in zip(trace.modules, trace.layers, strict=True)
        }
        weight = next(model.parameters())
        packs = why_not_packed(weight.dtype, weight.device) is None
        self.replaced = Replaced(model, trace.one_input, coded, packs=packs)
        find_sites(model, self._head.body, services, (kept.name for kept in trace.states), self.replaced.groups)
        self._body = Body(self._head.body)
        self._states = States(layers_of(model, trace), self._body, trace.hidden_size)
        self._tried = False
        self._objection: str | None = None

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        if batch.overlay is not None:
            raise Unsupported(PROVIDER, "overlay", "it takes token ids only")
        paged = bridge.PagedAttention(batch, self._layers, self._segments(batch))
        with bridge.handled_by(paged), self._states.shown(batch.taps):
            output = self._body(batch.input_ids, batch.positions)
        return hidden_states(output)[0]

    def _segments(self, batch: ForwardBatch) -> tuple[Segment, ...]:
        if not self._kept:
            return ()
        if batch.states is None:
            raise RuntimeError("the model's layers keep states, and the batch has none: no device part has set them")
        return segments_of(batch.states, batch.num_tokens)

    def capture_objection(self) -> str | None:
        """See `capture`; tried once."""
        if not self._tried:
            self._objection = capture_objection(self.model, self._layers, self._step, self._kept)
            self._tried = True
        return self._objection

    def _step(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.logits(hidden_states(self._body(ids, positions))[0])

    def weights(self) -> WeightStore:
        if isinstance(self.store, str):
            raise Unsupported(PROVIDER, "updates", self.store)
        return self.store

    @torch.inference_mode()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._states.embed(ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.logits(hidden).float()

    @torch.inference_mode()
    def reference_logits(self, prompt: list[int]) -> torch.Tensor:
        """Return logits float32 [len, vocab] of one prompt by the model's own attention and experts, without us."""
        device = next(self.model.parameters()).device
        with self._own_attention():
            output = self.model(input_ids=torch.tensor([prompt], device=device), use_cache=False)
        logits: torch.Tensor = output.logits[0].float()
        return logits

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        self.model.set_attn_implementation("eager")
        self._use_experts("eager")
        try:
            yield
        finally:
            self.model.set_attn_implementation(bridge.PAGED)
            self._use_experts(EXPERTS)

    def _use_experts(self, implementation: str) -> None:
        """Set what computes experts, where their weights are there to be read."""
        if any(keeps_codes(module) for module in self.model.modules()):
            return
        for module in self.model.modules():
            if hasattr(module, "has_post_expert_norm"):
                module.config._experts_implementation = implementation


def _place(module: torch.nn.Module, args: tuple[object, ...], named: dict[str, object]) -> _Arguments | None:
    """Tell an attention module that counts the tokens before its own where these are, in a pass over a batch. A trial
    of graphs has none: there they are the first ones.
    """
    batch = bridge.batch_of_pass()
    if batch is None:
        return None
    places = torch.arange(batch.num_tokens, device=batch.positions.device)
    return args, {**named, CACHE_NAMES[0]: PackedPositions(batch.positions - places)}
