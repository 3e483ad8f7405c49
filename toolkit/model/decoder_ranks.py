"""How ranks share a decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import ModelError

if TYPE_CHECKING:
    from pegboard.toolkit.model.decoder_spec import DecoderSpec
    from pegboard.toolkit.model.ranks import Ranks


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
