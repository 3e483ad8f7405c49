"""Assembly of what prepares media, by config and model. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.plugins.media import MEDIA_PROCESSOR
from pegboard.plugins.media.api import MediaContext
from pegboard.plugins.media.frontend.fetch import Fetcher, FetchLimits
from pegboard.plugins.media.frontend.lanes import Lanes
from pegboard.plugins.media.frontend.layout import Layouts
from pegboard.plugins.media.frontend.prepare import AT_ONCE, Preparer
from pegboard.plugins.media.frontend.prompts import MediaFrontend
from pegboard.plugins.media.frontend.sources import Sources
from pegboard.plugins.media.frontend.stats import MediaStats
from pegboard.plugins.media.frontend.store import MediaStore
from pegboard.plugins.media.frontend.worker import Start
from pegboard.plugins.media.options import media_limits
from pegboard.toolkit.model.model_config import read_model_config

if TYPE_CHECKING:
    from pegboard.core.interfaces.choosing import Blueprint
    from pegboard.core.interfaces.frontend import FrontendContext
    from pegboard.plugins.media.options import MediaSection


def build_media(ctx: FrontendContext, config: MediaSection, piece_tokens: int | None = None) -> MediaFrontend | None:
    """Return what prepares media for a model; None for a model that takes none, and where the config says so. Its files
    go to `ctx.scratch`, which is made. A piece has at most `piece_tokens`.

    Raises ConfigError where a processor is named that does not support the model, and PegboardError where the folder
    cannot be made. Processes start with the first item.
    """
    if not config.enabled:
        return None
    context = MediaContext(ctx.directory, read_model_config(ctx.directory), media_limits(config, piece_tokens))
    processor = ctx.find(MEDIA_PROCESSOR, context)
    if processor is None:
        return None
    stats = MediaStats()
    store = MediaStore(ctx.scratch, config.max_bytes_in_flight)
    start = _start(config, ctx.blueprint(MEDIA_PROCESSOR), context, str(ctx.scratch))
    pool = Lanes(start, stats, helpers=config.helpers)
    # Each helper has its next item ready.
    at_once = max(AT_ONCE, 2 * config.helpers)
    most = config.max_queued + config.helpers
    expect = processor.expected_pixels
    preparer = Preparer(store, _sources(config), pool, stats, most=most, at_once=at_once, expect=expect)
    return MediaFrontend(preparer, Layouts(processor, ctx.tokenizer), processor.kinds, config.max_items)


def _start(config: MediaSection, blueprint: Blueprint, context: MediaContext, media: str) -> Start:
    """Return what a helper process is to be."""
    return Start(
        factory=blueprint.factory,
        options_model=blueprint.options_model,
        options=dict(blueprint.options),
        directory=str(context.directory),
        hf_config=dict(context.hf_config),
        limits=context.limits,
        media=media,
        memory=config.helper_bytes,
        seconds=config.prepare_seconds,
    )


def _sources(config: MediaSection) -> Sources:
    limits = FetchLimits(config.max_item_bytes, config.fetch_seconds, config.fetch_ports, config.allowed_domains)
    return Sources(config.max_item_bytes, Fetcher(limits) if config.fetch else None, config.allowed_paths)
