"""Who prepares and encodes a model's media, and the memory that this takes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import ConfigError
from pegboard.plugins.media import MEDIA_ENCODER, MEDIA_PROCESSOR
from pegboard.plugins.media.api import MediaContext
from pegboard.plugins.media.arrival import Arrivals
from pegboard.plugins.media.encoder_cache import EncoderCache
from pegboard.plugins.media.options import media_limits
from pegboard.plugins.media.stage import MediaStage

if TYPE_CHECKING:
    import torch

    from pegboard.core.interfaces.layers import ModelSpec
    from pegboard.core.interfaces.stage import StageContext
    from pegboard.plugins.media.api import MediaEncoder, MediaProcessor
    from pegboard.plugins.media.options import MediaSection

logger = logging.getLogger(__name__)

PIECE_TOKENS_GPU = 16_384
"""What an unset `media.max_piece_tokens` allows: the most that the configs of the Qwen-VL models do."""
PIECE_TOKENS_CPU = 2048
"""The same on a CPU. On two cores at 2 GHz, the tower of Qwen3-VL-2B takes 70 s for so many, and an hour for 16,384."""


@dataclass(frozen=True, slots=True)
class ChosenMedia:
    """Who prepares a model's media, and who encodes them, with `piece_tokens` in a piece at most."""

    processor: MediaProcessor
    encoder: MediaEncoder
    piece_tokens: int


def choose_media(ctx: StageContext, section: MediaSection) -> ChosenMedia | None:
    """Return who deals with the model's media; None for a model without any, and where the config wants none. Raises
    ConfigError where the chosen runner, or the network that it runs, cannot take states for tokens.
    """
    if not section.enabled:
        return None
    most = piece_tokens(section, ctx.model.device)
    about = MediaContext(ctx.directory, ctx.model.hf_config, media_limits(section, most))
    processor, encoder = ctx.find(MEDIA_PROCESSOR, about), ctx.find(MEDIA_ENCODER, ctx.model)
    if processor is None or encoder is None:
        _say_why(ctx, processor, encoder)
        return None
    if section.max_piece_tokens is None:
        logger.info("media.max_piece_tokens: %d, automatic: by the device; larger pictures are resized", most)
    if who := ctx.lacking("overlay"):
        raise ConfigError(
            f"the {who} cannot take media (it lacks the capability overlay); "
            f"choose another one, or serve the model for text alone with media.enabled: false"
        )
    return ChosenMedia(processor, encoder, most)


def piece_tokens(config: MediaSection, device: torch.device) -> int:
    """Return the most tokens of a piece."""
    return config.max_piece_tokens or (PIECE_TOKENS_CPU if device.type == "cpu" else PIECE_TOKENS_GPU)


def _say_why(ctx: StageContext, processor: object, encoder: object) -> None:
    """Log why a model with media is served for text alone; nothing for a model without any."""
    names = (MEDIA_PROCESSOR.name, MEDIA_ENCODER.name)
    why = "; ".join(f"{name} {one}" for name in names for one in ctx.missing(name))
    if why:
        logger.warning("media: a library is missing, so this model is served for text alone: %s", why)
    elif (processor is None) != (encoder is None):
        missing = names[0] if processor is None else names[1]
        logger.warning("media: no %s supports this model, so it is served for text alone", missing)


def token_width(encoder: MediaEncoder, spec: ModelSpec) -> int:
    """Return how many numbers one encoded token has, deep states included."""
    return spec.hidden_size * (1 + encoder.levels)


def media_stage(ctx: StageContext, section: MediaSection, chosen: ChosenMedia) -> MediaStage:
    """Return the scheduler's half, with its books."""
    encoder, page_size = chosen.encoder, ctx.config.memory.page_size
    width = token_width(encoder, ctx.spec)
    step_tokens = section.encode_tokens or ctx.chunk_size or ctx.config.scheduler.max_prefill_tokens
    books = EncoderCache(section.cache_bytes, width * encoder.ctx.dtype.itemsize, step_tokens)
    arrivals = Arrivals(encoder, books, page_size, ctx.scratch, width)
    offers = tuple(f"media.{kind}" for kind in sorted(chosen.processor.kinds))
    said = {"width": width, "piece_tokens": chosen.piece_tokens}
    return MediaStage(arrivals, page_size, offers, said)
