"""Causal language models of transformers, with our attention in the place of theirs."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.layers import ModelSpec
from pegboard.core.interfaces.model_family import ModelFamily, Network
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.model_transformers.configs import NotServable
from pegboard.plugins.model_transformers.limits import examine
from pegboard.plugins.model_transformers.loading import load_model
from pegboard.plugins.model_transformers.network import TransformersNetwork
from pegboard.plugins.model_transformers.store import TransformersStore
from pegboard.toolkit.model.coded import quantized_weights
from pegboard.toolkit.model.hf_files import eos_token_ids
from pegboard.toolkit.model.kv_groups import grouped, groups_of, window_groups
from pegboard.toolkit.model.kv_scales import read_kv_scales
from pegboard.toolkit.model.ranks import alone
from pegboard.toolkit.model.rope_spec import tell_dual_chunks
from pegboard.toolkit.model.weights import checkpoint_files, read_header

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pegboard.core.interfaces.model_family import ModelContext, ProbeRun
    from pegboard.core.interfaces.weights import WeightStore
    from pegboard.plugins.model_transformers.trace import Trace

_PROBE_LENGTHS = (23, 14)
_PROBE_LONGEST = 160
_FLOAT32_TOLERANCE = 1e-3
_HALF_TOLERANCE = 0.15
"""Relative error of a position's logits that the probe bears. Models that cannot work this way are off by about 1;
bfloat16 alone makes 0.01 to 0.05, and a mixture of experts may send a token elsewhere."""


class TransformersFamily(ModelFamily[NoOptions]):
    """Every causal language model of transformers that calls transformers' attention interface.

    What it asks of attention is recorded from a run without weights (see `trace`); a start then compares two
    requests in one batch with the model's own attention on each alone, because a model may mix tokens in ways that
    no recording shows.
    """

    def __init__(self, options: NoOptions, ctx: ModelContext) -> None:
        super().__init__(options, ctx)
        try:
            found, length = self._examine()
        except NotServable as err:
            raise ModelError(f"{ctx.architecture} {err}") from None
        groups = window_groups((layer.window for layer in found.layers), length, ctx)
        if ctx.context_length is None:
            tell_dual_chunks(ctx.hf_config, length)
        self._trace = replace(found, layers=grouped(found.layers, groups))
        self._spec = ModelSpec(
            architecture=ctx.architecture,
            vocab_size=self._trace.vocab_size,
            hidden_size=self._trace.hidden_size,
            max_context_len=length,
            layers=self._trace.layers,
            kv_groups=groups_of(self._trace.layers),
            eos_token_ids=eos_token_ids(ctx.directory),
            states=tuple(state for module in self._trace.states for _, state in module.states),
        )

    def _examine(self) -> tuple[Trace, int]:
        return examine(self.ctx)

    @classmethod
    def supports(cls, options: NoOptions, ctx: ModelContext) -> str | None:
        if (objection := alone(ctx)) is not None:
            return objection
        try:
            examine(ctx)
        except NotServable as err:
            return f"{ctx.architecture or 'the model'} {err}"
        return None

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def load(self) -> Network:
        found = self._trace
        linears = [name for names in found.one_input for name in names]
        model, coded = load_model(self.ctx, found.parameters, linears, found.experts)
        network = TransformersNetwork(model, found, self.ctx.services, coded)
        network.store = self._store(network)
        return network

    def _store(self, network: TransformersNetwork) -> WeightStore | str:
        """Return the weights, to be replaced, or why they cannot be."""
        if quantized_weights(self.ctx) is not None:
            return "its weights are quantised"
        stored = {name for file in checkpoint_files(self.ctx.directory) for name in read_header(file)}
        store = TransformersStore(network.model, stored, network.replaced)
        renamed = store.expected().keys() - stored
        return f"transformers makes {min(renamed)} of other tensors of the checkpoint" if renamed else store

    def kv_scales(self) -> Mapping[int, tuple[float, float]]:
        return read_kv_scales(self.ctx.directory, (layer.layer_id for layer in self._spec.layers))

    def probe(self, network: Network, run: ProbeRun) -> None:
        """Two requests of different lengths in one batch against the model's own attention on each alone, with weights
        packed where that pays. If they are wrong, parts that are replaced are given up, one kind after the other, and
        packing at last if these alone do not suffice.
        """
        assert isinstance(network, TransformersNetwork)
        replaced, prompts = network.replaced, probe_prompts(self.spec)
        references = [network.reference_logits(prompt) for prompt in prompts]

        def wrong(*, packed: bool) -> ModelError | None:
            (replaced.pack if packed else replaced.unpack)()
            return self._wrong(prompts, references, run)

        if replaced.packs and wrong(packed=True) is None:
            return
        while (why := wrong(packed=False)) is not None:
            if (kind := replaced.give_up()) is None:
                raise why
            logger.warning("%s: the %s of transformers are used, and not ours: %s", self.ctx.architecture, kind, why)
        if replaced.packs and (why := wrong(packed=True)) is not None:
            logger.warning("%s: weights are not packed: %s", self.ctx.architecture, why)
            replaced.unpack()
            replaced.packs = False

    def _wrong(self, prompts: list[list[int]], references: list[torch.Tensor], run: ProbeRun) -> ModelError | None:
        """Return what is wrong with the logits of prompts in a batch."""
        name = self.ctx.architecture
        try:
            found = run.logits(prompts)
        except (RuntimeError, LookupError, TypeError, ValueError, NotImplementedError) as err:
            wrong = ModelError(f"{name} does not run on paged attention: {type(err).__name__}: {err}")
            wrong.__cause__ = err
            return wrong
        exact = self.ctx.dtype == torch.float32
        tolerance = _FLOAT32_TOLERANCE if exact else _HALF_TOLERANCE
        for number, (ours, theirs) in enumerate(zip(found, references, strict=True), start=1):
            errors = relative_errors(ours, theirs)
            # In half precision single positions may differ, a whole request may not.
            error = float(errors.max() if exact else errors.quantile(0.75))
            if not error <= tolerance:
                return ModelError(
                    f"{name} gives wrong logits on paged attention: request {number} of a batch of "
                    f"{len(prompts)} is off by {error:.3g} relative (at most {tolerance:g} is right), compared with "
                    "the model's own attention on that request alone. It mixes tokens outside of attention, or "
                    "ignores positions"
                )
        return None


def probe_prompts(spec: ModelSpec) -> list[list[int]]:
    """Return token ids spread over the vocabulary, the same at every start; the first prompt goes beyond a short
    sliding window.
    """
    draw = torch.Generator().manual_seed(0)
    longest, shorter = _PROBE_LENGTHS
    windows = [2 * layer.window + 3 for layer in spec.layers if layer.window is not None]
    longest = max([longest, *(length for length in windows if length <= _PROBE_LONGEST)])
    lengths = (min(longest, spec.max_context_len), min(shorter, spec.max_context_len))
    return [torch.randint(0, spec.vocab_size, (length,), generator=draw).tolist() for length in lengths]


def relative_errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """|found - expected| / |expected| per position [len], of logits [len, vocab] freed of their mean; NaN counts as
    infinite.
    """
    found, expected = found.double().to(expected.device), expected.double()
    expected_spread = expected - expected.mean(-1, keepdim=True)
    found_spread = found - found.mean(-1, keepdim=True)
    errors = (found_spread - expected_spread).norm(dim=-1) / expected_spread.norm(dim=-1).clamp_min(1e-12)
    return torch.nan_to_num(errors, nan=float("inf"), posinf=float("inf"))
