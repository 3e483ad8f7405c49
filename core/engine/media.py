"""The engine's part that is about media: who prepares and encodes them, and the memory that this takes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.core.engine.media_frontend import media_limits
from pegboard.core.interfaces.contracts import MEDIA_ENCODER, MEDIA_PROCESSOR
from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.interfaces.media import MediaContext, MediaEncoder, MediaProcessor
from pegboard.core.pipeline.media.arrival import MediaStage
from pegboard.core.pipeline.media.encoder_cache import EncoderCache
from pegboard.core.pipeline.media.states import EncodedMedia
from pegboard.core.pipeline.media.timing import timer_of

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.config.media_section import MediaSection
    from pegboard.core.config.sections import EngineConfig
    from pegboard.core.config.select import Choice, Selection
    from pegboard.core.interfaces.layers import ModelSpec
    from pegboard.core.interfaces.model_family import ModelContext

logger = logging.getLogger(__name__)

PIECE_TOKENS_GPU = 16_384
"""What an unset `media.max_piece_tokens` allows: the most that the configs of the Qwen-VL models do."""
PIECE_TOKENS_CPU = 2048
"""The same on a CPU. On two cores at 2 GHz, the tower of Qwen3-VL-2B takes 70 s for so many, and an hour for 16,384."""


@dataclass(frozen=True, slots=True)
class ChosenMedia:
    """Who prepares a model's media, and who encodes them."""

    processor: Choice[MediaProcessor, MediaContext]
    encoder: Choice[MediaEncoder, ModelContext]
    context: MediaContext

    @property
    def features(self) -> tuple[str, ...]:
        """Return what requests may bring; see ModelInfo."""
        return tuple(f"media.{kind}" for kind in sorted(self.processor.build(self.context).kinds))


@dataclass(frozen=True, slots=True)
class MediaParts:
    """The scheduler's books, and the worker's states, of `width` numbers a token."""

    stage: MediaStage
    encoded: EncodedMedia
    width: int

    def read_from(self, directory: Path) -> None:
        """Say where the files of items are."""
        self.stage.directory = self.encoded.directory = directory


def choose_media(resolved: ResolvedConfig, selection: Selection, model: ModelContext) -> ChosenMedia | None:
    """Return who deals with the model's media; None for a model without any, and where the config wants none."""
    section = resolved.engine.media
    if not section.enabled:
        return None
    most = piece_tokens(section, model.device)
    context = MediaContext(model.directory, model.hf_config, media_limits(section, most))
    processor, encoder = selection.find(MEDIA_PROCESSOR, context), selection.find(MEDIA_ENCODER, model)
    if processor is None or encoder is None:
        _say_why(selection, processor, encoder)
        return None
    if section.max_piece_tokens is None:
        logger.info("media.max_piece_tokens: %d, automatic: by the device; larger pictures are resized", most)
    return ChosenMedia(processor, encoder, context)


def piece_tokens(config: MediaSection, device: torch.device) -> int:
    """Return the most tokens of a piece."""
    return config.max_piece_tokens or (PIECE_TOKENS_CPU if device.type == "cpu" else PIECE_TOKENS_GPU)


def _say_why(selection: Selection, processor: object, encoder: object) -> None:
    """Log why a model with media is served for text alone; nothing for a model without any."""
    names = (MEDIA_PROCESSOR.name, MEDIA_ENCODER.name)
    why = "; ".join(f"{name} {one}" for name in names for one in selection.missing(name))
    if why:
        logger.warning("media: a library is missing, so this model is served for text alone: %s", why)
    elif (processor is None) != (encoder is None):
        missing = names[0] if processor is None else names[1]
        logger.warning("media: no %s supports this model, so it is served for text alone", missing)


def check_overlay(media: ChosenMedia | None, selection: Selection) -> None:
    """Raise ConfigError where the chosen runner, or the network that it runs, cannot take states for tokens."""
    if media is None:
        return
    (runner,) = selection.choices["runner"]
    computing = [runner] if "own_weights" in runner.provides else [runner, *selection.choices["model_family"]]
    for one in computing:
        if "overlay" not in one.provides:
            contract = one.record.provider.contract
            raise ConfigError(
                f"the {contract.replace('_', ' ')} {one.name!r} cannot take media (it lacks the capability overlay); "
                f"choose another one, or serve the model for text alone with media.enabled: false"
            )


def token_width(encoder: MediaEncoder, spec: ModelSpec) -> int:
    """Return how many numbers one encoded token has, deep states included."""
    return spec.hidden_size * (1 + encoder.levels)


def token_bytes(encoder: MediaEncoder, spec: ModelSpec, itemsize: int) -> int:
    """Return the bytes of one encoded token, deep states included."""
    return token_width(encoder, spec) * itemsize


def media_parts(encoder: MediaEncoder, config: EngineConfig, spec: ModelSpec, chunk: int | None) -> MediaParts:
    """Return the parts around a loaded encoder. `chunk` is the size of a chunk of a prompt, None without chunks."""
    section, dtype = config.media, encoder.ctx.dtype
    step_tokens = section.encode_tokens or chunk or config.scheduler.max_prefill_tokens
    books = EncoderCache(section.cache_bytes, token_bytes(encoder, spec, dtype.itemsize), step_tokens)
    width = token_width(encoder, spec)
    encoded = EncodedMedia(encoder, spec.hidden_size, dtype, timer_of(encoder.ctx.device))
    return MediaParts(MediaStage(encoder, books, config.memory.page_size, width), encoded, width)
