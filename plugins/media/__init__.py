"""Pictures and videos in prompts: prepared, encoded in steps of their own, and read by the model in place of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.contract import Cardinality, Contract
from pegboard.core.interfaces.plugin import Plugin

if TYPE_CHECKING:
    from pegboard.plugins.media.api import EncoderContext, MediaContext, MediaEncoder, MediaProcessor

MEDIA_PROCESSOR: Contract[MediaProcessor, MediaContext] = Contract(
    "media_processor",
    "media.processor",
    Cardinality.MATCHED,
    "pegboard.plugins.media.api:MediaProcessor",
    "prepares pictures and video for a model, and lays them out in its prompts",
    suite="pegboard.plugins.media.suite.media_processor:MediaProcessorContract",
    capabilities={"encoded": "takes items that requests have encoded themselves: `shape_of` answers for them"},
    optional=True,
    api_side=True,
)
MEDIA_ENCODER: Contract[MediaEncoder, EncoderContext] = Contract(
    "media_encoder",
    "media.encoder",
    Cardinality.MATCHED,
    "pegboard.plugins.media.api:MediaEncoder",
    "turns pictures and video into states that stand for tokens",
    suite="pegboard.plugins.media.suite.media_encoder:MediaEncoderContract",
    optional=True,
)

plugin = Plugin(
    name="media",
    version="0.1.0",
    other_servers="pegboard.plugins.media:other_servers.yaml",
    summary="pictures and videos in prompts",
    contracts=(MEDIA_PROCESSOR, MEDIA_ENCODER),
    fields={"": "pegboard.plugins.media.options:MediaFields"},
    hooks=("pegboard.plugins.media.hooks:MediaHooks",),
)
