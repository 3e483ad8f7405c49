"""docs/metrics.md against what is exposed: the same metrics, of the same kinds."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pegboard.plugins.metrics_prometheus.collector import SchedulerCollector
from pegboard.plugins.metrics_prometheus.http_metrics import HttpMetrics
from pegboard.plugins.metrics_prometheus.media import ENCODES, MediaCollector

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def exposed() -> set[tuple[str, str]]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SchedulerCollector("m", lambda: {ENCODES: 1}))
    media = MediaCollector("m", ("image",), {})
    text = generate_latest(registry).decode() + media.render() + HttpMetrics().render()
    families = [one for one in text_string_to_metric_families(text) if "_process_" not in one.name]
    return {(one.name + "_total" * (one.type == "counter"), one.type) for one in families}


def test_every_metric_is_documented_and_the_other_way_round() -> None:
    rows = re.findall(r"^\| `(pegboard_\w+)` \| (\w+) \|", PAGE.read_text("utf-8"), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == exposed() | {("pegboard_up", "gauge")}
