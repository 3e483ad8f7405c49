"""A running server, which has metrics by default: what it says after a few requests."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.servers import serving


def test_the_page_of_a_running_server(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    config = {
        "model": {"path": str(model), "dtype": "float32", "served_name": ["tiny", "small"]},
        "memory": {"max_total_tokens": 1024},
    }
    body = {"text": "hello", "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}}
    with serving(config, env={**os.environ, "OMP_NUM_THREADS": "1"}) as server:
        for _ in range(3):
            assert httpx.post(f"{server.address}/generate", json=body, timeout=60).status_code == 200
        answer = httpx.get(f"{server.address}/metrics")
        known = httpx.get(f"{server.address}/v1/models").json()["data"]
        told = httpx.get(f"{server.address}/model_info").json()
        head = httpx.head(f"{server.address}/metrics")
    assert [one["id"] for one in known] == told["served_model_names"] == ["tiny", "small"]
    assert (told["model_type"], told["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert (head.status_code, head.content) == (200, b"")
    assert answer.status_code == 200
    page = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert page["pegboard_up",] == 1
    assert page["pegboard_generation_tokens_total", "tiny"] == 18
    assert page["pegboard_requests_finished_total", "tiny", "length"] == 3
    assert page["pegboard_time_to_first_token_seconds_count", "tiny"] == 3
    assert page["pegboard_inter_token_latency_seconds_count", "tiny"] == 15
    assert page["pegboard_cached_tokens_total", "tiny"] > 0
    assert page["pegboard_max_total_num_tokens", "tiny"] == 1024
    assert page["pegboard_num_requests_running", "tiny"] == 0
    assert page["pegboard_stage_seconds_total", "tiny", "forward"] > 0
    assert page["pegboard_http_requests_total", "/generate", "200"] == 3
