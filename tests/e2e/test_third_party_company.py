"""The example's stages in servers with every built-in feature: 40 requests, some aborted, and the books right."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from pegboard.conformance.servers import free_ports, serving
from pegboard.conformance.vl_checkpoints import vl_checkpoint
from tests.e2e.test_clients_media import TURN, data, png
from tests.e2e.test_third_party import installed

__all__ = ["installed"]

KEY, ADMIN = "sk-someone", "sk-admin"
STEM = "one two three four five six seven eight nine ten "
LENGTH, LONG = 10, 1500
PATIENCE = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.full]


class Server:
    """A server with all of it, as its clients see it. Servers that read KV would come to `port`."""

    def __init__(self, client: httpx.Client, port: int) -> None:
        self.client = client
        self._rooms = iter(range(1000, 2000))
        self._port = port

    def post(self, path: str, body: dict[str, Any] | None = None, key: str = KEY) -> Any:
        response = self.client.post(path, json=body, headers={"authorization": f"Bearer {key}"})
        assert response.status_code == 200, response.text
        return response.json()

    def generate(self, text: str, sampling: dict[str, Any] | None = None, **more: Any) -> Any:
        params = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True, **(sampling or {})}
        return self.post("/generate", {"text": text, "sampling_params": params, **more})

    def plain(self, number: int) -> None:
        """With the entropy of each token."""
        told = self.generate(STEM + str(number), params={"entropy": True})
        assert len(told["output_ids"]) == len(told["meta_info"]["extra"]["entropy"]) == LENGTH
        assert all(0 <= value < 20 for value in told["meta_info"]["extra"]["entropy"])

    def drafted(self, number: int) -> None:
        """Within a grammar."""
        told = self.generate(f"{number} again", {"regex": "[ab]{999}", "max_new_tokens": 40})
        assert set(told["text"]) <= {"a", "b"}
        assert told["meta_info"]["spec_draft_token_num"] >= told["meta_info"]["spec_accept_token_num"]

    def seen(self, number: int) -> None:
        told = self.generate(TURN, image_data=data(png(number)))["meta_info"]
        assert told["prompt_tokens"] > told["image_tokens"] > 3

    def rows(self, number: int) -> None:
        asked: dict[str, Any] = {"return_hidden_states": True, "return_logprob": True, "logprob_start_len": 0}
        told = self.generate(STEM + str(number), **asked)["meta_info"]
        assert len(told["hidden_states"]) == LENGTH
        assert len(told["input_token_logprobs"]) == told["prompt_tokens"]

    def embedded(self, number: int) -> None:
        told = self.post("/v1/embeddings", {"model": "", "input": f"{STEM} {number}"})
        assert told["data"][0]["embedding"]

    def timed(self, number: int) -> None:
        told = self.generate(f"{number} for long", {"max_new_tokens": LONG}, params={"seconds": 0.3})
        assert told["meta_info"]["finish_reason"]["type"] == "length"
        assert len(told["output_ids"]) < LONG

    def stopped(self, number: int) -> None:
        self.generate(f"{number} until", {"stop_regex": ["[a-z] ?[a-z]"], "max_new_tokens": 30})

    def handed_over(self, number: int) -> None:
        """Nobody reads it, so it is held for a while."""
        room: dict[str, Any] = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self._port,
            "bootstrap_room": next(self._rooms),
        }
        told = self.generate(STEM * 3 + str(number), **room)
        assert len(told["output_ids"]) <= 1

    def left(self, number: int) -> None:
        """Read a little of a long answer, and leave."""
        params = {"max_new_tokens": LONG, "ignore_eos": True}
        body = {"text": f"{STEM} {number}", "sampling_params": params, "stream": True}
        headers = {"authorization": f"Bearer {KEY}"}
        with self.client.stream("POST", "/generate", json=body, headers=headers) as response:
            assert response.status_code == 200, response.read()
            next(response.iter_lines())

    def aborted(self, number: int) -> None:
        """By an operator, while it runs or waits."""
        rid = f"gone {number}"
        body = {"rid": rid, "text": STEM, "sampling_params": {"max_new_tokens": LONG, "ignore_eos": True}}
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(self.post, "/generate", body)
            while not answer.done():
                self.post("/abort_request", {"rid": rid}, key=ADMIN)
                time.sleep(0.02)
        assert answer.result()["meta_info"]["finish_reason"]["type"] == "abort"

    def info(self) -> dict[str, Any]:
        response = self.client.get("/server_info", headers={"authorization": f"Bearer {ADMIN}"})
        return dict(response.raise_for_status().json())


WAYS = ("plain", "drafted", "seen", "rows", "embedded", "timed", "stopped", "handed_over", "left", "aborted")


def config(model: Path, loop: str, directory: Path, port: int) -> dict[str, Any]:
    stages = {"every": 3, "phrases": {str(token): [token % 50 + 1, 7] for token in range(60)}}
    return {
        "model": {"path": str(model), "dtype": "float32", "context_length": 4096, "hidden_states": True},
        "runner": {"use": "layered"},
        "memory": {
            "max_total_tokens": 4096, "page_size": 4, "host": {"use": "page_first", "max_total_tokens": 8192},
            "storage": [{"use": "files", "dir": str(directory / "kv")}], "storage_block": 16,
        },
        "prefix_cache": {"use": "hiradix"},
        "scheduler": {"loop": loop, "max_running_requests": 8, "chunked_prefill_size": 32, "split_prefill_layers": 1},
        "speculation": {"use": "ngram", "min_match": 1, "adaptive": False},
        "gates": [
            {"use": "session"},
            {"use": "prefetch", "policy": "best_effort", "threshold": 16},
            {"use": "disagg", "role": "prefill", "listen": f"127.0.0.1:{port}", "hold": 0.3},
        ],
        "plugins": {"example_stages": stages},
        "server": {"api_key": KEY, "admin_key": ADMIN, "profile_dir": str(directory / "traces")},
        "log_level": "warning",
    }  # fmt: skip


def is_over(now: dict[str, Any]) -> bool:
    states = ("running_requests", "waiting_requests", "blocked_requests", "held_requests", "locked_tokens")
    return not any(now[state] for state in states)


def forty(server: Server) -> None:
    """Eight at a time, while the operator looks at the steps, and stops them for a moment."""
    server.post("/start_profile", {"num_steps": 20, "activities": ["CPU"], "with_stack": False}, key=ADMIN)
    with ThreadPoolExecutor(8) as threads:
        jobs = [threads.submit(getattr(server, way), number) for number in range(4) for way in WAYS]
        assert len(jobs) == 40
        jobs[9].result()
        server.post("/pause_generation", {"mode": "retract"}, key=ADMIN)
        assert server.info()["scheduler"]["paused"]
        server.post("/continue_generation", key=ADMIN)
        for job in jobs:
            job.result()


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_with_every_feature(loop: str, installed: dict[str, str], tmp_path: Path) -> None:
    """Each answer is of the kind that was asked for, no call of a plugin has failed, and nothing is left behind."""
    model = vl_checkpoint(tmp_path, "qwen2_vl")
    (port,) = free_ports(1)
    with (
        serving(config(model, loop, tmp_path, port), env=installed) as running,
        httpx.Client(base_url=running.address, timeout=PATIENCE) as client,
    ):
        server = Server(client, port)
        assert client.post("/generate", json={"text": STEM}).status_code == 401
        forty(server)
        end = time.monotonic() + PATIENCE
        while not is_over(now := server.info()["scheduler"]):
            assert time.monotonic() < end, f"it is not over: {now}"
            time.sleep(0.05)
        assert (now["book_errors"], now["failed_batches"], now["plugin_failures"], now["kv_changed"]) == (0, 0, 0, 0)
        assert (now["held_tokens"], now["seated_requests"], now["quarantined_tokens"]) == (0, 0, 0)
        assert now["free_tokens"] + now["cached_tokens_now"] == now["total_tokens"]
        assert now["aborted"] >= 8
        for name in ("kv_checked", "drafted_tokens", "encoded_pieces", "cached_tokens"):
            assert now[name] > 0, name
        assert now["tiers"]["stored_tokens_total"] > 0
        assert now["gate_stats"]["grammar"]["cached"] == 1
        assert [path.suffix for path in (tmp_path / "traces").rglob("*.*")], "a trace is written"
        server.post("/flush_cache", key=ADMIN)
        assert server.info()["scheduler"]["free_tokens"] == now["total_tokens"]
