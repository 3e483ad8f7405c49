"""Metrics of media: a real scheduler around a fake encoder, and what the API process says of preparing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pegboard.conformance.asgi import call
from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.conformance.rig.fake_media import fake_processor
from pegboard.core.interfaces.api_router import ApiContext
from pegboard.plugins.metrics_prometheus.collector import SchedulerCollector
from pegboard.plugins.metrics_prometheus.options import MetricsOptions
from pegboard.plugins.metrics_prometheus.router import MetricsRouter
from pegboard.toolkit.http.app import build_app
from tests.plugins.media.media_harness import Album, media_harness, submit


def read(text: str) -> dict[tuple[str, ...], float]:
    """Every series of media by its name and label values, the model's name left out."""
    return {
        (sample.name, *(value for label, value in sample.labels.items() if label != "model_name")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("pegboard_mm_")
    }


def test_encoding_as_the_scheduler_counts_it(tmp_path: Path) -> None:
    """One picture of two is known when it comes again; encoding takes a millisecond a step in this harness."""
    harness, album = media_harness(tmp_path), Album(tmp_path)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SchedulerCollector("m", harness.scheduler.info))
    for rid, names in (("a", "xy"), ("b", "xz")):
        items = [album.item(name, 2, 3) for name in names]
        submit(harness, rid, album.prompt(album.words(3), *items))
        harness.run()
    page = read(generate_latest(registry).decode())
    steps = harness.points.reports.figures()["encode_steps"]
    assert steps >= 2
    assert page == {
        ("pegboard_mm_encode_steps_total",): steps,
        ("pegboard_mm_encode_seconds_total",): steps * 0.001,
        ("pegboard_mm_encoded_pieces_total",): 3,
        ("pegboard_mm_encoder_cache_hits_total",): 1,
        ("pegboard_mm_encoder_cache_bytes",): 3 * 6 * 4,
        ("pegboard_mm_encoder_cache_capacity_bytes",): 64 * 4,
    }


class Preparing(FakeEngineClient):
    """Has prepared some media, if its model takes any. No scheduler answers."""

    def media_figures(self) -> Mapping[str, Any]:
        return {
            "items": {"image": 5},
            "failures": {"invalid_media": 2},
            "seconds": 1.5,
            "received_bytes": 1000,
            "prepared_bytes": 9000,
            "open": 3,
            "files": 4,
            "bytes_in_flight": 7000,
            "helpers_lost": 1,
        }


def scraped(client: FakeEngineClient) -> dict[tuple[str, ...], float]:
    router = MetricsRouter(MetricsOptions(), ApiContext(client=client, max_body_bytes=1000))

    async def scene() -> str:
        answer = await call(build_app([("metrics", router)], max_body_bytes=1000), "GET", "/metrics")
        return answer.body.decode()

    return read(asyncio.run(scene()))


def test_preparing_as_the_api_process_counts_it() -> None:
    """Also while the scheduler is away. A kind of which nothing has come yet is there, as 0."""
    assert scraped(Preparing(media=fake_processor())) == {
        ("pegboard_mm_items_total", "image"): 5,
        ("pegboard_mm_items_total", "video"): 0,
        ("pegboard_mm_failures_total", "invalid_media"): 2,
        ("pegboard_mm_prepare_seconds_total",): 1.5,
        ("pegboard_mm_received_bytes_total",): 1000,
        ("pegboard_mm_prepared_bytes_total",): 9000,
        ("pegboard_mm_items_in_preparation",): 3,
        ("pegboard_mm_files_in_flight",): 4,
        ("pegboard_mm_bytes_in_flight",): 7000,
        ("pegboard_mm_helpers_lost_total",): 1,
    }


def test_a_model_without_media_has_no_such_metrics() -> None:
    assert scraped(Preparing()) == {}
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SchedulerCollector("m", lambda: {"encode_steps": 0, "encode_time": 0.0}))
    assert read(generate_latest(registry).decode()) == {}
