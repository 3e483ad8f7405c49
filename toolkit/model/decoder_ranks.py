"""How ranks share a decoder: each section some layers, and each rank of a section a share of their matrices."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import ModelError
from pegboard.toolkit.model.decoder_names import DecoderNames
from pegboard.toolkit.model.weights import checkpoint_files, read_header

if TYPE_CHECKING:
    from pathlib import Path

    from pegboard.toolkit.model.decoder_spec import DecoderSpec
    from pegboard.toolkit.model.ranks import Ranks
    from pegboard.toolkit.model.sections import Sections


def sectioned(spec: DecoderSpec, sections: Sections, directory: Path | None) -> DecoderSpec:
    """Return the decoder with the layers of one section, by the bytes that the checkpoint in `directory` has of each;
    None: by the number of their weights. Raises ModelError where they cannot be divided so.
    """
    if sections.count == 1:
        return spec
    layers, ends = _weights(spec) if directory is None else stored_bytes(spec, directory)
    return replace(spec, section=sections.own(layers, ends))


def _weights(spec: DecoderSpec) -> tuple[list[int], int]:
    """Return the number of weights of each layer, and of embeddings and head together, biases and norms apart."""
    hidden, mlp = spec.hidden_size, 3 * spec.hidden_size * spec.intermediate_size
    attention = 2 * hidden * (spec.q_size + spec.kv_size)
    moe = spec.moe
    experts = 0 if moe is None else moe.num_experts * 3 * hidden * moe.intermediate_size
    has_experts = [False] * spec.num_layers if moe is None else moe.layers
    ends = spec.vocab_size * hidden * (1 if spec.tied_embeddings else 2)
    return [attention + (experts if found else mlp) for found in has_experts], ends


def stored_bytes(spec: DecoderSpec, directory: Path) -> tuple[list[int], int]:
    """Return the bytes of each layer in a checkpoint, and those of embeddings and head together."""
    names, layers, ends = DecoderNames.of(spec, directory), [0] * spec.num_layers, 0
    for file in checkpoint_files(directory):
        for name, stored in read_header(file).items():
            if (layer := names.layer_of(name)) is not None and layer < spec.num_layers:
                layers[layer] += stored.nbytes
            elif names.is_end(name) and not names.ignores(name):
                ends += stored.nbytes
    return layers, ends


def shared(spec: DecoderSpec, ranks: Ranks) -> DecoderSpec:
    """Return the decoder with the heads and the intermediate size of one rank. Where there are more ranks than KV
    heads, several ranks have the same one. Raises ModelError where sizes do not divide, naming those that would.
    """
    if ranks.size == 1:
        return spec
    if not _divides(spec, ranks.size):
        able = [str(size) for size in range(1, spec.num_heads + 1) if _divides(spec, size)]
        shown = f"{', '.join(able[:-1])} or {able[-1]}" if len(able) > 1 else able[0]
        raise ModelError(
            f"parallel.tensor: {spec.num_heads} query heads, {spec.num_kv_heads} KV heads and {_described(spec)} "
            f"do not divide by {ranks.size}; tensor may be {shown}"
        )
    return replace(
        spec,
        num_heads=spec.num_heads // ranks.size,
        num_kv_heads=max(1, spec.num_kv_heads // ranks.size),
        intermediate_size=spec.intermediate_size // ranks.size,
    )


def _widths(spec: DecoderSpec) -> list[int]:
    """Return the intermediate sizes of the MLPs and the experts that the decoder has."""
    if spec.moe is None:
        return [spec.intermediate_size]
    return [spec.moe.intermediate_size, *([] if all(spec.moe.layers) else [spec.intermediate_size])]


def _described(spec: DecoderSpec) -> str:
    widths = _widths(spec)
    return f"{'an intermediate size' if len(widths) == 1 else 'intermediate sizes'} of {' and '.join(map(str, widths))}"


def _divides(spec: DecoderSpec, size: int) -> bool:
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    kv_fits = kv_heads % size == 0 or size % kv_heads == 0
    return heads % size == 0 and kv_fits and all(width % size == 0 for width in _widths(spec))
