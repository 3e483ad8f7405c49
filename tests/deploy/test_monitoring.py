"""Queries of the dashboard and of the alerts: each metric and each label that they name exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.deploy.exposition import exposed

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/pegboard.json").read_text("utf-8"))
TROUBLE = (DEPLOY.parent / "docs" / "troubleshooting.md").read_text("utf-8")
RUNBOOK = "https://github.com/pegboard-serving/pegboard/blob/main/docs/troubleshooting.md#an-alert-fires"
RULES = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text("utf-8"))["groups"][0]["rules"]
SERIES = re.compile(r"\b(up|pegboard_\w+)\b(?:\{([^}]*)\})?")
GROUPING = re.compile(r"\b(?:by|ignoring|on|without)\s*\(([^)]*)\)")


def panels() -> list[dict[str, object]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> dict[str, str]:
    """Return each query, by what asks it."""
    found = {rule["alert"]: rule["expr"] for rule in RULES}
    for panel in panels():
        targets = panel["targets"]
        assert isinstance(targets, list)
        found |= {f"{panel['title']} {target['refId']}": target["expr"] for target in targets}
    return found


def wrong(query: str, known: dict[str, set[str]]) -> set[str]:
    """Return the metrics and labels of a query that do not exist."""
    without = re.sub(r'"[^"]*"', '""', query)
    found, labels = set(), set()
    for name, matchers in SERIES.findall(without):
        if name not in known:
            found.add(name)
            continue
        labels |= known[name]
        found |= {f"{name}{{{one}}}" for one in re.findall(r"(\w+)\s*[=!]", matchers) if one not in known[name]}
    grouped = {one.strip() for group in GROUPING.findall(without) for one in group.split(",")}
    return found | (grouped - labels)


@pytest.mark.parametrize("asked_by", queries())
def test_what_queries_name_exists(asked_by: str) -> None:
    assert wrong(queries()[asked_by], exposed()) == set()


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("rate(pegboard_retractions[5m])", {"pegboard_retractions"}),
        ('sum(pegboard_requests_finished_total{cause="x"})', {"pegboard_requests_finished_total{cause}"}),
        ("sum by (model) (pegboard_token_usage)", {"model"}),
        ('up{job="a, b=c"} == 0', set()),
    ],
)
def test_wrong_queries_are_found(query: str, found: set[str]) -> None:
    assert wrong(query, exposed()) == found


def test_texts_name_labels_that_their_query_keeps() -> None:
    for rule in RULES:
        used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        kept = {one.strip() for group in GROUPING.findall(rule["expr"]) for one in group.split(",")}
        assert used <= (kept or {"instance", "model_name"}), rule["alert"]
    for panel in panels():
        targets = panel["targets"]
        assert isinstance(targets, list)
        for target in targets:
            used = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            grouped = {one.strip() for group in GROUPING.findall(target["expr"]) for one in group.split(",")}
            assert used <= (grouped or {"instance"}), panel["title"]


def test_alerts_say_how_urgent_they_are_and_what_is_wrong() -> None:
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]


def test_alerts_lead_to_a_table_that_has_each_of_them() -> None:
    page, _, rest = TROUBLE.partition("\n## An alert fires\n")
    assert page
    told = re.findall(r"^\| `(\w+)` \| .+ \| .+ \|$", rest, re.MULTILINE)
    assert sorted(told) == sorted(rule["alert"] for rule in RULES)
    assert {rule["annotations"]["runbook_url"] for rule in RULES} == {RUNBOOK}


def test_panels_do_not_overlap_and_have_a_name_each() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        columns, rows = (range(place[at], place[at] + place[size]) for at, size in (("x", "w"), ("y", "h")))
        assert set(columns) <= set(range(24)), panel["title"]
        taken = {(column, row) for column in columns for row in rows}
        assert not taken & cells, panel["title"]
        cells |= taken
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


def test_variables_that_queries_use_are_there() -> None:
    names = {one["name"] for one in DASHBOARD["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"]))) - {"__rate_interval"} == names
