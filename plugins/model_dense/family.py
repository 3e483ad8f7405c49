"""The family: which models it takes, and how their weights are read."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pegboard.core.interfaces.errors import ConfigError, ModelError
from pegboard.core.interfaces.model_family import ModelContext, ModelFamily
from pegboard.plugins.model_dense.options import DenseOptions
from pegboard.toolkit.model.coded import quantized_weights
from pegboard.toolkit.model.decoder_ranks import sectioned, shared
from pegboard.toolkit.model.decoder_spec import DecoderSpec
from pegboard.toolkit.model.hf_files import eos_token_ids
from pegboard.toolkit.model.kv_groups import window_groups
from pegboard.toolkit.model.ranks import Ranks, ranks_of
from pegboard.toolkit.model.rope_spec import tell_dual_chunks

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pegboard.core.interfaces.layers import ModelSpec
    from pegboard.core.interfaces.model_family import Network
    from pegboard.core.interfaces.weights import WeightStore
    from pegboard.plugins.model_dense.network import DenseNetwork
    from pegboard.toolkit.model.linear import Site


class DenseFamily(ModelFamily[DenseOptions]):
    """Llama, Mistral, Qwen2, Qwen3 (with experts as well), Mixtral and the text towers of Qwen2-VL, 2.5-VL, 3-VL. GGUF
    files arrive here already converted to safetensors.
    """

    def __init__(self, options: DenseOptions, ctx: ModelContext) -> None:
        super().__init__(options, ctx)
        self._weights = quantized_weights(ctx)
        self._ranks = ranks_of(ctx)
        decoder = DecoderSpec.from_config(ctx.hf_config, coded=self._weights is not None)
        decoder = replace(decoder, window_groups=_window_groups(ctx, decoder))
        self._decoder = sectioned(decoder, self._ranks.sections, _checkpoint(options, ctx))
        self._spec = shared(self._decoder, self._ranks).model_spec(
            context_length=ctx.context_length, eos_token_ids=eos_token_ids(ctx.directory)
        )
        if ctx.context_length is None:
            tell_dual_chunks(ctx.hf_config, self._spec.max_context_len)

    @classmethod
    def supports(cls, options: DenseOptions, ctx: ModelContext) -> str | None:
        """Return None where `DecoderSpec` can read the config, and the ranks can share the network; else why not."""
        coded, ranks = quantized_weights(ctx) is not None, ranks_of(ctx)
        try:
            decoder = DecoderSpec.from_config(ctx.hf_config, coded=coded)
            shared(decoder, ranks)
            sectioned(decoder, ranks.sections, _checkpoint(options, ctx))
        except ModelError as error:
            return str(error)
        if ranks.sections.count > 1 and _window_groups(ctx, decoder):
            return (
                "its layers with a sliding window have KV groups of their own, which sections of layers do not have; "
                "set memory.window_pages to false, or parallel.pipeline to 1"
            )
        return _experts_objection(ctx, decoder, ranks.size, coded=coded) if ranks.size > 1 else None

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def load(self) -> Network:
        """Allocate the network, copy every tensor into its place, and pack. Raises ModelError, and ConfigError where
        packing is insisted on and cannot be done.
        """
        from pegboard.toolkit.model.linear import tell_sites

        if (section := self._decoder.section) is not None:
            logger.info("layers %d to %d of %d", section.start, section.stop - 1, self._decoder.num_layers)
        network, sites = self._drawn() if self.options.load_format == "dummy" else self._read()
        tell_sites(self.ctx.services, sites)
        packs = self._packs()
        network.store = self._why_fixed() or self._store(network, packs=packs)
        if packs:
            network.pack()
        return network.eval()

    def _why_fixed(self) -> str:
        """Return why the weights cannot be replaced, "" if they can."""
        if self._weights is not None:
            return "its weights are quantised"
        if self._ranks.size > 1 or self._ranks.sections.count > 1:
            return "ranks share its weights"
        return "the encoder of its pictures would keep its weights" if self._decoder.tower else ""

    def _store(self, network: DenseNetwork, *, packs: bool) -> WeightStore:
        from pegboard.plugins.model_dense.store import DenseStore
        from pegboard.toolkit.model.decoder_names import DecoderNames

        drawn = self.options.load_format == "dummy"
        tied = DecoderNames(tied=self._decoder.tied_embeddings)
        return DenseStore(network, tied if drawn else DecoderNames.of(self._decoder, self.ctx.directory), packs=packs)

    def _read(self) -> tuple[DenseNetwork, Sequence[Site]]:
        from pegboard.plugins.model_dense.network import DenseNetwork
        from pegboard.toolkit.model.decoder_names import DecoderNames
        from pegboard.toolkit.model.layers import Linears
        from pegboard.toolkit.model.weights import check_weights, load_weights

        directory, dtype, weights, ranks = self.ctx.directory, self.ctx.dtype, self._weights, self._ranks
        names, section = DecoderNames.of(self._decoder, directory), self._decoder.section
        whole = Linears(dtype, torch.device("meta"), ranks=Ranks(ranks.size, ranks.index))
        meta = DenseNetwork(replace(self._decoder, section=None), whole)
        check_weights(directory, names.targets(meta.targets()), ignore=names.ignores, coded=weights)

        def ignores(name: str) -> bool:
            others = section is not None and names.elsewhere(name, section, self._decoder.num_layers)
            return others or names.ignores(name)

        linears = Linears(dtype, self.ctx.device, weights, names.stored, ranks)
        network = DenseNetwork(self._decoder, linears)
        load_weights(directory, names.targets(network.targets()), ignore=ignores, coded=weights)
        linears.read()
        return network, linears.sites

    def _drawn(self) -> tuple[DenseNetwork, Sequence[Site]]:
        from pegboard.plugins.model_dense.network import DenseNetwork
        from pegboard.toolkit.model.dummy import draw_weights
        from pegboard.toolkit.model.layers import Linears

        logger.warning("model.load_format is dummy: weights are random, and answers have no meaning")
        linears = Linears(self.ctx.dtype, self.ctx.device, ranks=self._ranks)
        network = DenseNetwork(self._decoder, linears)
        draw_weights(network)
        return network, linears.sites

    def kv_scales(self) -> Mapping[int, tuple[float, float]]:
        from pegboard.toolkit.model.kv_scales import read_kv_scales

        if self.options.load_format == "dummy":
            return {}
        return read_kv_scales(self.ctx.directory, (layer.layer_id for layer in self._spec.layers))

    def _packs(self) -> bool:
        """Return whether to pack. The log says it, and why not."""
        from pegboard.toolkit.model.packed import why_not_packed

        wanted = self.options.packed
        reason = "model.packed is off" if wanted == "off" else why_not_packed(self.ctx.dtype, self.ctx.device)
        if reason is None:
            logger.info("linear layers: weights packed by oneDNN")
            return True
        if wanted == "on":
            raise ConfigError(f"model.packed: {reason}; leave it at auto")
        if self.ctx.device.type == "cpu":
            logger.info("linear layers: plain torch; %s", reason)
        return False


def _checkpoint(options: DenseOptions, ctx: ModelContext) -> Path | None:
    """Return the directory whose weights are read, if they are."""
    return None if options.load_format == "dummy" else ctx.directory


def _window_groups(ctx: ModelContext, decoder: DecoderSpec) -> tuple[int, ...]:
    return window_groups(decoder.windows, ctx.context_length or decoder.max_position, ctx)


def _experts_objection(ctx: ModelContext, decoder: DecoderSpec, ranks: int, *, coded: bool) -> str | None:
    """Return None where so many ranks can share a model's experts, if it has any; else why not."""
    if decoder.moe is None:
        return None
    if coded:
        return f"codes of experts are not cut for ranks, and parallel.tensor is {ranks}"
    from pegboard.toolkit.model.decoder_names import DecoderNames, Experts

    try:
        together = DecoderNames.of(decoder, ctx.directory).experts is not Experts.SINGLE
    except ModelError as error:
        return str(error)
    if not together:
        return None
    return (
        f"its checkpoint has all experts of a layer in one tensor, ranks read a share of each expert's own, and "
        f"parallel.tensor is {ranks}"
    )
