"""Weights that are replaced over HTTP."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.rig.other_weights import other_weights, tensors_of
from pegboard.conformance.servers import Served, serving

PROMPT = [40, 41, 42, 43, 50, 51, 52, 53, 54]
JSON = "application/json"
MOST_BODY = 64 * 1024
"""Of a prompt; weights may be larger."""


@pytest.fixture(scope="module")
def base(checkpoints: Path) -> Path:
    return tiny_checkpoint(checkpoints, "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def served(base: Path) -> Iterator[Served]:
    config = {
        "model": {"path": str(base), "dtype": "float32"},
        "runner": {"use": "layered"},
        "memory": {"max_total_tokens": 2048},
        "apis": ["native", "openai"],
        "weight_updates": {"enabled": True, "directories": [str(base.parent)]},
        "server": {"max_body_bytes": MOST_BODY},
    }
    with serving(config) as server:
        yield server
        assert "Traceback" not in server.log(), server.log()


def ask(served: Served, path: str, body: bytes | None = None, kind: str = JSON) -> tuple[int, Any]:
    request = urllib.request.Request(f"{served.address}{path}", body, {"Content-Type": kind})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, content = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, content = error.code, error.read()
    return status, json.loads(content) if content else None


def post(served: Served, path: str, **body: object) -> tuple[int, Any]:
    return ask(served, path, json.dumps(body).encode())


def generated(served: Served, **more: object) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    status, answer = post(served, "/generate", input_ids=PROMPT, sampling_params=sampling, **more)
    assert status == 200, answer
    found: dict[str, Any] = answer
    return found


@pytest.mark.full
def test_updates(served: Served, base: Path, tmp_path: Path) -> None:
    """From disk and from tensors; versions everywhere; pickles and other things are refused."""
    first, other = generated(served), other_weights(base)
    assert first["meta_info"]["weight_version"] == "default"
    status, answer = post(served, "/update_weights_from_disk", model_path=str(other), weight_version="v2")
    assert (status, answer["success"], answer["weight_version"], answer["tensors"]) == (200, True, "v2", 21)
    second = generated(served)
    assert second["output_ids"] != first["output_ids"]
    assert second["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["weight_version"] == "v2"
    assert "extra" not in second["meta_info"]
    for path in ("/get_weight_version", "/model_info"):
        assert ask(served, path)[1]["weight_version"] == "v2"
    chat = {"model": "x", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    assert post(served, "/v1/completions", **{**chat, "model": ask(served, "/v1/models")[1]["data"][0]["id"]})[1][
        "choices"
    ][0]["extra"] == {"weight_version": "v2"}
    file = tmp_path / "new.safetensors"
    save_file(tensors_of(base), file)
    octets = "application/octet-stream"
    assert file.stat().st_size > 2 * MOST_BODY
    status, answer = ask(served, "/update_weights_from_tensor?weight_version=v3", file.read_bytes(), octets)
    assert (status, answer["weight_version"]) == (200, "v3")
    assert generated(served)["output_ids"] == first["output_ids"]
    status, answer = post(served, "/get_weights_by_name", name="model.norm.weight", truncate_size=3)
    assert (status, answer["shape"], answer["dtype"]) == (200, [64], "float32")
    assert answer["values"] == pytest.approx(tensors_of(base)["model.norm.weight"][:3].tolist())
    for path, body, kind, code in (
        ("/update_weights_from_tensor", b'{"serialized_named_tensors": ["gAR"]}', JSON, "not_safetensors"),
        ("/update_weights_from_tensor", b"\x80\x04\x95 pickled", octets, "bad_weights"),
        ("/update_weights_from_tensor", b"", octets, "bad_weights"),
        ("/update_weights_from_tensor?mode=gently", file.read_bytes(), octets, None),
        ("/update_weights_from_disk", b'{"model_path": "/etc"}', JSON, "bad_weights"),
        ("/update_weights_from_disk", b"{}", JSON, None),
        ("/get_weights_by_name", b'{"name": "odd"}', JSON, None),
    ):
        status, answer = ask(served, path, body, kind)
        assert status in (400, 404), answer
        assert code is None or answer["error"]["code"] == code
    assert generated(served)["meta_info"]["weight_version"] == "v3"
    assert ask(served, "/health")[0] == 200


def test_memory(served: Served, base: Path, tmp_path: Path) -> None:
    """A request that comes meanwhile waits and is answered then."""
    file = tmp_path / "again.safetensors"
    save_file(tensors_of(base), file)
    assert ask(served, "/update_weights_from_tensor", file.read_bytes(), "application/octet-stream")[0] == 200
    before, answers = generated(served), []
    assert post(served, "/release_memory_occupation")[0] == 200
    thread = threading.Thread(target=lambda: answers.append(generated(served)))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    assert ask(served, "/health")[0] == 200
    assert post(served, "/release_memory_occupation", tags=["odd"])[0] == 400
    status, answer = post(served, "/resume_memory_occupation", tags=["kv_cache"])
    assert (status, answer["success"]) == (200, True)
    # The weights came as tensors: they are nowhere to be read again.
    status, answer = post(served, "/resume_memory_occupation", tags=["weights"])
    assert (status, answer["waits_for"]) == (200, "update_weights")
    assert thread.is_alive()
    path = ask(served, "/model_info")[1]["model_path"]
    assert post(served, "/update_weights_from_disk", model_path=path)[0] == 200
    thread.join(60)
    assert answers[0]["output_ids"] == before["output_ids"]
