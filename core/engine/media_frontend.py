"""Assembly of what prepares media: chosen by config and model, for the API process of a server and for the in-process
engine. No torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.contracts import MEDIA_PROCESSOR
from pegboard.core.interfaces.media import MediaContext, MediaLimits
from pegboard.core.pipeline.frontend.media.fetch import Fetcher, FetchLimits
from pegboard.core.pipeline.frontend.media.frontend import MediaFrontend
from pegboard.core.pipeline.frontend.media.lanes import Lanes
from pegboard.core.pipeline.frontend.media.layout import Layouts
from pegboard.core.pipeline.frontend.media.prepare import AT_ONCE, Preparer
from pegboard.core.pipeline.frontend.media.sources import Sources
from pegboard.core.pipeline.frontend.media.stats import MediaStats
from pegboard.core.pipeline.frontend.media.store import MediaStore
from pegboard.core.pipeline.frontend.media.worker import Start
from pegboard.toolkit.model.model_config import read_model_config

if TYPE_CHECKING:
    from pathlib import Path

    from pegboard.core.config.media_section import MediaSection
    from pegboard.core.config.select import Choice, Selection
    from pegboard.core.engine.source import PreparedModel
    from pegboard.core.interfaces.media import MediaProcessor


def build_media(
    config: MediaSection,
    selection: Selection,
    model: PreparedModel,
    directory: Path,
    piece_tokens: int | None = None,
) -> MediaFrontend | None:
    """Return what prepares media for a model; None for a model that takes none, and where the config says so. Its files
    go to `directory`, which is made. A piece has at most `piece_tokens` (`ModelInfo.stages`).

    Raises ConfigError where a processor is named that does not support the model, and PegboardError where the folder
    cannot be made. Processes start with the first item.
    """
    if not config.enabled:
        return None
    context = MediaContext(model.directory, read_model_config(model.directory), media_limits(config, piece_tokens))
    choice = selection.find(MEDIA_PROCESSOR, context)
    if choice is None:
        return None
    processor = choice.build(context)
    stats = MediaStats()
    store = MediaStore(directory, config.max_bytes_in_flight)
    pool = Lanes(_start(config, choice, context, directory), stats, helpers=config.helpers)
    # Each helper has its next item ready.
    at_once = max(AT_ONCE, 2 * config.helpers)
    most = config.max_queued + config.helpers
    expect = processor.expected_pixels
    preparer = Preparer(store, _sources(config), pool, stats, most=most, at_once=at_once, expect=expect)
    return MediaFrontend(preparer, Layouts(processor, model.tokenizer), processor.kinds, config.max_items)


def media_limits(config: MediaSection, piece_tokens: int | None) -> MediaLimits:
    """Return what the config allows of one item, and of a piece what the engine's device does."""
    return MediaLimits(
        max_pixels=config.max_pixels,
        resized_pixels=config.max_resized_pixels,
        max_frames=config.max_frames,
        max_seconds=config.max_seconds,
        piece_tokens=piece_tokens,
    )


def _start(
    config: MediaSection, choice: Choice[MediaProcessor, MediaContext], context: MediaContext, directory: Path
) -> Start:
    """Return what a helper process is to be."""
    return Start(
        factory=choice.record.provider.factory,
        options_model=choice.record.provider.config or "pegboard.core.interfaces.options:NoOptions",
        options=choice.options.model_dump(mode="json"),
        directory=str(context.directory),
        hf_config=dict(context.hf_config),
        limits=context.limits,
        media=str(directory),
        memory=config.helper_bytes,
        seconds=config.prepare_seconds,
    )


def _sources(config: MediaSection) -> Sources:
    limits = FetchLimits(config.max_item_bytes, config.fetch_seconds, config.fetch_ports, config.allowed_domains)
    return Sources(config.max_item_bytes, Fetcher(limits) if config.fetch else None, config.allowed_paths)
