"""What can be said of a model from its config.json alone: whether we can serve it, and for how long a context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import ModelError
from pegboard.plugins.model_transformers.configs import CAUSAL, WITH_PICTURES, NotServable, classes, config_of
from pegboard.plugins.model_transformers.trace import Trace, trace
from pegboard.toolkit.model.coded import quantized_weights
from pegboard.toolkit.model.kv_config import quantization_of
from pegboard.toolkit.model.rope_spec import DUAL_CHUNKS, lengthened, without_dual_chunks

if TYPE_CHECKING:
    from pegboard.core.interfaces.model_family import ModelContext

_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")

_CHANGES_WITH_LENGTH = frozenset({"dynamic", "longrope", "su"})
"""Rope types whose frequencies depend on how long the longest sequence of a batch is."""


def examine(ctx: ModelContext) -> tuple[Trace, int]:
    """Return how the model attends, and the longest context it can be served with.

    Loads no weights. Raises NotServable, whose text completes the sentence "<architecture> ...".
    """
    _check_class(ctx)
    config = config_of(ctx.hf_config).get_text_config()
    length = _context_length(ctx, config)
    _check_rope(config, length)
    return trace(ctx.hf_config, length, ctx.dtype), length


def _check_class(ctx: ModelContext) -> None:
    import transformers

    if not ctx.architecture:
        raise NotServable("is not named: config.json has no `architectures`")
    if ctx.architecture not in classes(CAUSAL) | classes(WITH_PICTURES):
        raise NotServable(f"is not a causal language model that transformers {transformers.__version__} knows")
    model_type = ctx.hf_config.get("model_type")
    expected = classes(CAUSAL, model_type) | classes(WITH_PICTURES, model_type)
    if expected and ctx.architecture not in expected:
        raise NotServable(f"does not go with model_type {model_type!r}, whose class is {' or '.join(sorted(expected))}")
    if quantization_of(ctx.hf_config) is not None and quantized_weights(ctx) is None:
        raise NotServable("has quantised weights, which are not read here")
    if quantized_weights(ctx) is not None and classes(CAUSAL, model_type) and ctx.architecture not in classes(CAUSAL):
        raise NotServable("has quantised weights beside an encoder of pictures, which are not read here")


def _context_length(ctx: ModelContext, config: object) -> int:
    own = next(
        (value for key in _LENGTH_KEYS if isinstance(value := getattr(config, key, None), int) and value > 0), None
    )
    ropes = list(_rope_parameters(getattr(config, "rope_parameters", None)))
    if own is not None and len(ropes) == 1 and ropes[0].get("rope_type") == "yarn":
        factor, original = ropes[0].get("factor"), ropes[0].get("original_max_position_embeddings")
        if isinstance(factor, int | float) and (original is None or isinstance(original, int)):
            own = lengthened(own, original, factor)
    if own is not None:
        own = _without_dual_chunks(own, config)
    if own is not None and ctx.context_length is not None and ctx.context_length > own:
        raise NotServable(f"has positions for {own} tokens, so model.context_length cannot be {ctx.context_length}")
    length = ctx.context_length or own
    if length is None:
        raise NotServable("does not say how long its context may be; set model.context_length")
    return int(length)


def _without_dual_chunks(own: int, config: object) -> int:
    try:
        return without_dual_chunks(own, {DUAL_CHUNKS: getattr(config, DUAL_CHUNKS, None)})
    except ModelError as err:
        raise NotServable(f"is not understood: {err}") from err


def _check_rope(config: object, length: int) -> None:
    for rope in _rope_parameters(getattr(config, "rope_parameters", None)):
        kind = rope.get("rope_type", rope.get("type"))
        if not isinstance(kind, str) or kind not in _CHANGES_WITH_LENGTH:
            continue
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if original is None and kind == "dynamic":
            original = getattr(config, "max_position_embeddings", None)
        if not isinstance(original, int) or length > original:
            raise NotServable(
                f"has rotary positions of type {kind!r}, which change for the whole batch once one request is longer "
                f"than {original}; set model.context_length to at most that"
            )


def _rope_parameters(value: object) -> Iterator[Mapping[str, object]]:
    """Yield the rope settings of a config: one, or one per kind of layer."""
    if isinstance(value, Mapping):
        if "rope_type" in value or "type" in value:
            yield value
        for one in value.values():
            yield from _rope_parameters(one)
