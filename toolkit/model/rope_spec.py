"""Rotary position embeddings as a model's config describes them. No torch: `rope.py` does the arithmetic."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from pegboard.core.interfaces.errors import ModelError
from pegboard.toolkit.model.model_config import flag, number, size

logger = logging.getLogger(__name__)

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
"""The rope types that `inverse_frequencies` knows, under transformers' names."""

AXES = 3
"""Axes of a position in a prompt with media: time, height and width."""

DUAL_CHUNKS = "dual_chunk_attention_config"
"""Key of a config whose model attends in chunks of positions where a context is long."""

_PLACE = "config.json: rope parameters"
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention", "linear_attention"})


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Parameters of one rotary embedding.

    `dim` is the number of dimensions per head that turn, `theta` the base, `max_position` the model's limit (tokens).
    `factor` scales linear, dynamic, llama3 and yarn; `original_max_position` is the context of the pretraining for
    llama3 and yarn. `attention_factor` multiplies cos and sin; for yarn None means what its paper recommends. `axes`
    says for each of the dim / 2 frequencies which axis of a position turns it (0 time, 1 height, 2 width; Qwen2-VL's
    "M-RoPE", Wang et al. 2024); it is empty where positions have one axis. The rest belongs to the type that it is
    named after.
    """

    dim: int
    theta: float
    max_position: int
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float | None = None
    llama3_low_freq_factor: float = 1.0
    llama3_high_freq_factor: float = 4.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_mscale: float | None = None
    yarn_mscale_all_dim: float | None = None
    yarn_truncate: bool = True
    axes: tuple[int, ...] = ()

    @property
    def context(self) -> int:
        """Tokens of the longest context that the rope is meant for."""
        if self.rope_type != "yarn":
            return self.max_position
        return lengthened(self.max_position, self.original_max_position, self.factor)

    @property
    def attention_scaling(self) -> float:
        """What cos and sin are multiplied with: 1 but for yarn (Peng et al. 2023, "attention temperature")."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.yarn_mscale and self.yarn_mscale_all_dim:
            return _yarn_scale(self.factor, self.yarn_mscale) / _yarn_scale(self.factor, self.yarn_mscale_all_dim)
        return _yarn_scale(self.factor, 1.0)


def lengthened(max_position: int, original: int | None, factor: float) -> int:
    """Return the context of a model with yarn, in tokens: what it was trained with times the factor, as in vLLM, or
    more where `max_position_embeddings` says so.

    That key has the whole context in some configs (DeepSeek-V3), and in Qwen's recipe, which adds yarn alone, the one
    before: 32,768 in Qwen2.5, and 40,960 in Qwen3, which has room for an answer beside the 32,768 of the training.
    """
    return max(max_position, int((original or max_position) * factor)) if factor > 1 else max_position


def without_dual_chunks(max_position: int, config: Mapping[str, object]) -> int:
    """Return the context that a model has with ordinary attention, in tokens: dual chunk attention (Qwen2.5-1M; An et
    al. 2024) is the same up to the context of the training, and is not supported beyond. Raises ModelError where the
    config does not say how long that was.
    """
    given = config.get(DUAL_CHUNKS)
    if given is None:
        return max_position
    if not isinstance(given, Mapping):
        raise ModelError(f"config.json: {DUAL_CHUNKS} must be an object, found {given!r:.80}")
    return min(max_position, size(given, "original_max_position_embeddings", file=f"config.json: {DUAL_CHUNKS}"))


def tell_dual_chunks(hf_config: Mapping[str, object], context: int) -> None:
    """Say in the log that a config asks for dual chunk attention, if it does, and so has this `context` and no more."""
    stated = hf_config.get("max_position_embeddings")
    if hf_config.get(DUAL_CHUNKS) is not None and isinstance(stated, int) and stated > context:
        text = "%s is not supported, so prompt and output together are limited to %d tokens, not to %d"
        logger.warning(text, DUAL_CHUNKS, context, stated)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class RopeDefaults:
    """What an architecture's rope has where a config does not say.

    `sections` are the numbers of frequencies that each axis turns; without them positions have one axis, whatever the
    config says. `interleaved` axes take turns, others come one after the other.
    """

    theta: float = 10000.0
    sections: tuple[int, ...] = ()
    interleaved: bool = False


def rope_from_config(
    config: Mapping[str, object], head_dim: int, max_position: int, defaults: RopeDefaults | None = None
) -> RopeSpec:
    """Return the rope of a config.json, from transformers 5's `rope_parameters` or the older `rope_scaling` and
    `rope_theta`.

    Raises ModelError for a type that is not supported and for parameters that a type needs and the config lacks.
    """
    defaults = defaults or RopeDefaults()
    given = _given(config)
    rope_type = _rope_type(given, axes=bool(defaults.sections))
    key = "original_max_position_embeddings"
    original = next((size(where, key) for where in (config, given) if where.get(key)), None)
    theta = number(given, "rope_theta", number(config, "rope_theta", defaults.theta), file=_PLACE)
    factor = _factor(given, rope_type, max_position, original)
    llama3 = rope_type == "llama3"
    return RopeSpec(
        dim=head_dim,
        theta=theta,
        max_position=max_position,
        rope_type=rope_type,
        factor=factor,
        original_max_position=original or max_position,
        attention_factor=_optional(given, "attention_factor"),
        llama3_low_freq_factor=number(given, "low_freq_factor", None if llama3 else 1.0, file=_PLACE),
        llama3_high_freq_factor=number(given, "high_freq_factor", None if llama3 else 4.0, file=_PLACE),
        yarn_beta_fast=_optional(given, "beta_fast") or 32.0,
        yarn_beta_slow=_optional(given, "beta_slow") or 1.0,
        yarn_mscale=_optional(given, "mscale"),
        yarn_mscale_all_dim=_optional(given, "mscale_all_dim"),
        yarn_truncate=flag(given, "truncate", True, file=_PLACE),
        axes=_axes(given, head_dim // 2, defaults) if defaults.sections else (),
    )


def _given(config: Mapping[str, object]) -> Mapping[str, object]:
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"{_PLACE} must be an object, found {given!r:.80}")
    if _LAYER_TYPES & given.keys():
        raise ModelError(f"rope parameters per layer type ({', '.join(sorted(given))}) are not supported")
    partial = number(given, "partial_rotary_factor", number(config, "partial_rotary_factor", 1.0), file=_PLACE)
    if partial != 1.0:
        raise ModelError(f"partial rotary embeddings (partial_rotary_factor {partial:g}) are not supported")
    return given


def _rope_type(given: Mapping[str, object], *, axes: bool) -> str:
    name = given.get("rope_type") or given.get("type") or "default"
    if axes and name == "mrope":
        return "default"  # older configs name the axes as a type
    if not isinstance(name, str) or name not in ROPE_TYPES:
        raise ModelError(f"rope type {name!r:.80} is not supported; supported: {', '.join(ROPE_TYPES)}")
    return name


def _axes(given: Mapping[str, object], frequencies: int, defaults: RopeDefaults) -> tuple[int, ...]:
    """Return the axis of each frequency: in chunks, one after the other (Qwen2-VL), or by turns, where time turns what
    height and width leave over (Qwen3-VL).
    """
    counts = given.get("mrope_section") or list(defaults.sections)
    if (
        not isinstance(counts, list)
        or len(counts) != AXES
        or not all(type(one) is int and one >= 0 for one in counts)
        or sum(counts) != frequencies
    ):
        raise ModelError(
            f"{_PLACE}: mrope_section must be {AXES} numbers of frequencies, together {frequencies} (half of head_dim),"
            f" found {counts!r:.80}"
        )
    if not flag(given, "mrope_interleaved", defaults.interleaved, file=_PLACE):
        return tuple(axis for axis, count in enumerate(counts) for _ in range(count))
    return tuple(i % AXES if i < AXES * counts[i % AXES] else 0 for i in range(frequencies))


def _factor(given: Mapping[str, object], rope_type: str, max_position: int, original: int | None) -> float:
    if rope_type == "default":
        return 1.0
    if rope_type == "yarn" and given.get("factor") is None and original:
        return max_position / original
    return number(given, "factor", file=_PLACE)


def _optional(given: Mapping[str, object], key: str) -> float | None:
    return None if given.get(key) is None else number(given, key, file=_PLACE)
