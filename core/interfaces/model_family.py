"""Contract: a family of architectures. Builds networks and loads their weights."""

from __future__ import annotations

import abc
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.options import Component, OptionsT

if TYPE_CHECKING:
    import torch

    from pegboard.core.interfaces.forward import ForwardBatch
    from pegboard.core.interfaces.layers import ModelSpec
    from pegboard.core.interfaces.weights import WeightStore


@dataclass(frozen=True, slots=True)
class ModelContext:
    """A model directory in Hugging Face's layout, its parsed config.json, and where and how to run it.

    `context_length` is the operator's cap on prompt and output together, None for the model's own limit. `services` are
    objects that plugins have built for the model, by name (the hook `model_services`).
    """

    directory: Path
    hf_config: Mapping[str, Any]
    dtype: torch.dtype
    device: torch.device
    context_length: int | None = None
    services: Mapping[str, object] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """First entry of `architectures`, or "" where there is none."""
        names = self.hf_config.get("architectures") or [""]
        return str(names[0])


class Network(abc.ABC):
    """A loaded network. It reads ForwardBatch and calls `batch.attn_backend` layer by layer."""

    @abc.abstractmethod
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the last hidden states, after the final norm, [tokens, hidden] in the model's dtype. Runs in inference
        mode.

        Where other processes compute some of the layers, only the states of tokens that the batch wants have a meaning:
        of `logits_indices`, `logprob_rows` and `hidden_rows`; and only in processes that have embeddings and head.
        """

    def forward_in_parts(self, batch: ForwardBatch) -> Generator[None, None, torch.Tensor]:
        """`forward`, paused after every layer. Other batches may run through the network in a pause.

        This default has no pause.
        """
        yield from ()
        return self.forward(batch)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [n, hidden] of ids int64 [n], as they enter the first layer, in the model's dtype.
        Raises Unsupported without the capability `taps`.
        """
        raise Unsupported(f"the network {type(self).__name__}", "taps")

    def weights(self) -> WeightStore:
        """Lend the weights, to replace them. Raises Unsupported where this model, or the family, cannot."""
        raise Unsupported(f"the network {type(self).__name__}", "updates")

    def capture_objection(self) -> str | None:
        """Return None, or why the operations of this network depend on a decode batch's numbers although its family has
        the capability `graph`: its decode steps are then not captured.
        """
        return None

    @abc.abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return new logits float32 [n, vocab] of states [n, hidden], with the final soft cap or scale. The caller may
        change them.
        """


class ModelFamily(Component[OptionsT, ModelContext]):
    """Built cheaply from config.json alone; `spec` is then known, and `load` does the heavy work once. `supports` says
    which architectures, rope types and so on it can run.
    """

    @property
    @abc.abstractmethod
    def spec(self) -> ModelSpec:
        """Sizes and layers, from the config alone."""

    @abc.abstractmethod
    def load(self) -> Network:
        """Read the weights into a network on `ctx.device` in `ctx.dtype`.

        Raises ModelError naming file, tensor and shapes where the checkpoint does not fit its config.
        """

    def kv_scales(self) -> Mapping[int, tuple[float, float]]:
        """Return what the checkpoint says keys and values in 8 bits are to be multiplied by, for each layer of the
        spec; nothing where it does not say, and without the capability `kv_scales`, as here. Asked only where memory
        keeps 8 bits.

        Raises ModelError naming file and tensor for scales that are missing for some layers, or are not positive and
        finite.
        """
        return {}

    def probe(self, network: Network, run: ProbeRun) -> None:  # optional, nothing to check by default
        """Self-check after loading, for families that cannot know in advance whether a model works with paged
        attention.

        `run` executes token lists as one ragged batch over a scratch pool. Raises ModelError when the network's
        answers are wrong.
        """


class ProbeRun(abc.ABC):
    """Runs prompts through a network with the engine's own attention and a scratch pool."""

    @abc.abstractmethod
    def logits(self, prompts: list[list[int]]) -> list[torch.Tensor]:
        """Return logits float32 [len, vocab] of all positions of each prompt, from ragged batches of several."""
