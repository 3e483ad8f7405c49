"""Metrics of a model that takes media: preparing as the API process tells of it, encoding as the scheduler does."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pegboard.plugins.metrics_prometheus.families import Families

ENCODES = "encoder_cache_capacity"
"""The figure that the scheduler has only where the model takes media."""

_ENCODING = (
    ("mm_encode_steps", "encode_steps", "Steps that encoded media."),
    ("mm_encode_seconds", "encode_time", "Time that encoding media took."),
    ("mm_encoded_pieces", "encoded_pieces", "Pieces that were encoded: pictures, and temporal patches of videos."),
    ("mm_encoder_cache_hits", "encoder_cache_hits", "Pieces that a request found encoded when it was its turn."),
)
"""Metric without prefix and `_total`, the scheduler's figure, help. So below, with gauges and the API process."""

_ENCODER_CACHE = (
    ("mm_encoder_cache_bytes", "encoder_cache_bytes", "Memory that encoded media take on the device."),
    ("mm_encoder_cache_capacity_bytes", ENCODES, "Memory that encoded media may take on the device."),
)

ENCODING_FIGURES = frozenset(key for _, key, _ in (*_ENCODING, *_ENCODER_CACHE))

_PREPARING = (
    ("mm_prepare_seconds", "seconds", "Time that helper processes were at work on media."),
    ("mm_received_bytes", "received_bytes", "Bytes of the media that were prepared, as they were received."),
    ("mm_prepared_bytes", "prepared_bytes", "Bytes of the media that were prepared, as pixels."),
    ("mm_helpers_lost", "helpers_lost", "Helper processes that ended through no fault of an item."),
)

_IN_FLIGHT = (
    ("mm_items_in_preparation", "open", "Pictures and videos that are being prepared, or wait for it."),
    ("mm_files_in_flight", "files", "Files of media that requests under way need."),
    ("mm_bytes_in_flight", "bytes_in_flight", "Disk space that these files take."),
)


def encoding(families: Families, stats: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield what the scheduler's figures say of encoding; nothing for a model that takes no media."""
    if ENCODES not in stats:
        return
    for name, key, text in _ENCODING:
        yield families.counter(name, text, stats.get(key, 0))
    for name, key, text in _ENCODER_CACHE:
        yield families.gauge(name, text, stats.get(key, 0))


class MediaCollector(Collector):
    """What the figures of a MediaService say, of media of these `kinds`."""

    def __init__(self, model_name: str, kinds: Collection[str], stats: Mapping[str, Any]) -> None:
        self._families = Families(model_name)
        self._kinds = kinds
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        families, stats = self._families, self._stats
        # A series that begins with its first item would hide that item from `rate`.
        items = dict.fromkeys(sorted(self._kinds), 0) | stats.get("items", {})
        yield families.counter("mm_items", "Pictures and videos that were prepared, by kind.", items, "kind")
        text = "Pictures and videos that were refused or could not be prepared, by the error's code."
        yield families.counter("mm_failures", text, stats.get("failures", {}), "code")
        for name, key, text in _PREPARING:
            yield families.counter(name, text, stats.get(key, 0))
        for name, key, text in _IN_FLIGHT:
            yield families.gauge(name, text, stats.get(key, 0))

    def render(self) -> str:
        """Return everything in Prometheus' text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry).decode()
