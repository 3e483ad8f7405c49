"""The files, as the tools that will read them see them: kubectl, systemd and promtool, each where it is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"

pytestmark = pytest.mark.full


def needs(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(tool) is None, reason=f"needs {tool}")


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs("kubectl")
@pytest.mark.parametrize("folder", ["base", "gpu"])
def test_manifests_follow_the_published_schemas(folder: str) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    resources = list(yaml.safe_load_all(run("kubectl", "kustomize", DEPLOY / "kubernetes" / folder)))
    assert {resource["kind"] for resource in resources} == {"Deployment", "Service", "PodDisruptionBudget"}
    for resource in resources:
        for version in ("1.29", "1.33"):
            schemas.validate(resource, version, strict=True)


@needs("kubectl")
def test_a_pod_with_a_gpu() -> None:
    resources = list(yaml.safe_load_all(run("kubectl", "kustomize", DEPLOY / "kubernetes" / "gpu")))
    (pod,) = (one["spec"]["template"]["spec"] for one in resources if one["kind"] == "Deployment")
    (container,) = pod["containers"]
    assert container["image"] == "pegboard:cuda"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"


@needs("systemd-analyze")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "pegboard.service").read_text("utf-8")
    # A command that is there.
    unit = tmp_path / "pegboard.service"
    unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE), "utf-8")
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "pegboard" in line]) == (0, [])


@needs("systemd-analyze")
def test_the_unit_is_closed() -> None:
    # Exit status 1 where the exposure, times ten, is above.
    run("systemd-analyze", "security", "--offline=yes", "--threshold=20", DEPLOY / "systemd" / "pegboard.service")


@needs("promtool")
def test_prometheus_understands_its_files() -> None:
    run("promtool", "check", "config", "--syntax-only", DEPLOY / "prometheus" / "prometheus.yml")
    run("promtool", "check", "rules", ALERTS)


SERVER = {"instance": "a:1", "job": "pegboard"}
MODEL = {**SERVER, "model_name": "m"}


def series(name: str, labels: Mapping[str, str], values: str) -> dict[str, str]:
    inside = ", ".join(f'{key}="{value}"' for key, value in labels.items())
    return {"series": f"{name}{{{inside}}}", "values": values}


def histogram(name: str, slow: bool) -> list[dict[str, str]]:
    """Ten values a minute, all below 0.1, or all above 60."""
    few, all_of_them = "0x60", "0+10x60"
    return [
        series(f"pegboard_{name}_bucket", {**MODEL, "le": le}, few if slow and le != "+Inf" else all_of_them)
        for le in ("0.1", "60", "+Inf")
    ]


def http(status: str, values: str) -> dict[str, str]:
    return series("pegboard_http_requests_total", {**SERVER, "route": "/generate", "status": status}, values)


def finished(reason: str, values: str) -> dict[str, str]:
    return series("pegboard_requests_finished_total", {**MODEL, "reason": reason}, values)


HEALTHY = [
    series("up", SERVER, "1x60"),
    series("pegboard_up", SERVER, "1x60"),
    series("pegboard_scheduler_process_start_time_seconds", SERVER, "1000x60"),
    finished("stop", "0+1000x60"),
    finished("error", "0+5x60"),
    http("200", "0+1000x60"),
    http("503", "0+10x60"),
    *histogram("time_to_first_token_seconds", slow=False),
    *histogram("inter_token_latency_seconds", slow=False),
    series("pegboard_num_requests_waiting", MODEL, "100x54 0 100x5"),
    series("pegboard_retractions_total", MODEL, "0+201x60"),
    # Nearly all of them for a slot, and not for want of memory.
    series("pegboard_stages_total", {**MODEL, "figure": "adapters_slot_retractions"}, "0+200x60"),
    series("pegboard_requests_accepted_total", MODEL, "0+1000x60"),
    series("pegboard_plugin_failures_total", {**MODEL, "contract": "sampler", "provider": "x"}, "3x60"),
    series("pegboard_book_errors_total", MODEL, "0x60"),
    series("pegboard_failed_batches_total", MODEL, "2x60"),
    series("pegboard_trace_spans_total", {**SERVER, "outcome": "dropped"}, "7x60"),
]
"""An hour of a server that had its troubles before, by minutes."""

ILL: dict[str, Sequence[dict[str, str]]] = {
    "PegboardDown": [series("up", SERVER, "1x10 0x50")],
    "PegboardSchedulerDown": [series("pegboard_up", SERVER, "1x10 0x50")],
    "PegboardSchedulerRestarts": [
        series("pegboard_scheduler_process_start_time_seconds", SERVER, "1000x53 1100 1200 1300x5")
    ],
    "PegboardErrors": [finished("stop", "0+1000x60"), finished("error", "0+50x60")],
    "PegboardRefusing": [http("200", "0+1000x60"), http("503", "0+100x60")],
    "PegboardFirstTokenSlow": histogram("time_to_first_token_seconds", slow=True),
    "PegboardStreamsSlow": histogram("inter_token_latency_seconds", slow=True),
    "PegboardQueueGrows": [series("pegboard_num_requests_waiting", MODEL, "60x60")],
    "PegboardRetracts": [
        series("pegboard_retractions_total", MODEL, "0+20x60"),
        series("pegboard_requests_accepted_total", MODEL, "0+100x60"),
    ],
    "PegboardPluginFails": [
        series("pegboard_plugin_failures_total", {**MODEL, "contract": "sampler", "provider": "x"}, "3x55 4x5")
    ],
    "PegboardBooksWrong": [series("pegboard_book_errors_total", MODEL, "0x55 1x5")],
    "PegboardBatchesFail": [series("pegboard_failed_batches_total", MODEL, "2x55 3x5")],
    "PegboardSpansLost": [series("pegboard_trace_spans_total", {**SERVER, "outcome": "dropped"}, "7+1x60")],
}
"""What each alert is for."""


def firing(tmp_path: Path, given: Sequence[dict[str, str]], alert: str) -> bool:
    """Return whether an alert fires after an hour of these series."""
    test = {"interval": "1m", "input_series": given, "alert_rule_test": [{"eval_time": "60m", "alertname": alert}]}
    file = tmp_path / "test.json"
    file.write_text(json.dumps({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [test]}), "utf-8")
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, timeout=60, check=False)
    # It expects none, and says so where there is one.
    said = done.stdout + done.stderr
    assert done.returncode == 0 or f"alertname: {alert}" in said or "got:" in said, said
    return done.returncode != 0


@needs("promtool")
@pytest.mark.parametrize("alert", ILL)
def test_alerts(alert: str, tmp_path: Path) -> None:
    assert firing(tmp_path, ILL[alert], alert)
    assert not firing(tmp_path, HEALTHY, alert)


def test_every_alert_is_tried() -> None:
    rules = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"][0]["rules"]
    assert {rule["alert"] for rule in rules} == set(ILL)
