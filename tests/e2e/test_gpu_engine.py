"""Whole engines on a GPU: the features that take a path of their own there, against the same engine on the CPU.

Models are in float32, so that tokens must be alike. `PEGBOARD_GPU_DEVICE=cpu` rehearses them where there is no GPU.
"""

from __future__ import annotations

import gc
import io
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.servers import serving
from pegboard.conformance.vl_checkpoints import vl_checkpoint
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import PegboardError
from pegboard.core.interfaces.sampling import Grammar, SamplingParams
from pegboard.toolkit.media.inputs import MediaInput, MediaPrompt
from tests.plugins.spec_eagle.heads import Head

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("PEGBOARD_GPU_DEVICE", "cuda")
SHAPES = Path(__file__).parents[2] / "examples" / "shapes" / "model"
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=32, ignore_eos=True)
LOOPS = ("normal", "overlap")
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        "b": {"type": "boolean"},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(autouse=True)
def memory_back() -> Iterator[None]:
    """Give a closed engine's memory back before the next asks what is free."""
    yield
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def answers(path: Path, requests: list[GenerateRequest], device: str, **sections: Mapping[str, Any]) -> list[Any]:
    """Return tokens and reasons of all answers."""
    config: dict[str, dict[str, Any]] = {
        "model": {"path": str(path), "device": device, "dtype": "float32"},
        "memory": {"max_total_tokens": 4096},
        "runner": {"use": "layered"},
        "scheduler": {"max_running_requests": 8},
    }
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **values}
    with Engine.from_config(config) as engine:
        return [(answer.token_ids, answer.finish_reason) for answer in engine.run(requests)]


def plain(sampling: SamplingParams = GREEDY) -> list[GenerateRequest]:
    generator = np.random.default_rng(3)
    return [
        GenerateRequest(prompt=generator.integers(3, 300, size).tolist(), sampling=sampling) for size in (1, 7, 40, 130)
    ]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("topk", [1, 3])
def test_drafts_of_an_eagle_head_change_no_token(tmp_path: Path, loop: str, topk: int) -> None:
    model, head = tiny_checkpoint(tmp_path / "model", "llama"), Head().write(tmp_path / "head")
    drafting = {"use": "eagle", "draft": str(head), "topk": topk}
    found = answers(model, plain(), DEVICE, speculation=drafting, scheduler={"loop": loop})
    assert found == answers(model, plain(), "cpu")


@pytest.mark.parametrize("loop", LOOPS)
def test_grammars_mask_alike(tmp_path: Path, loop: str) -> None:
    pytest.importorskip("llguidance")
    model = tiny_checkpoint(tmp_path, "llama")
    schema = Grammar("json_schema", json.dumps(SCHEMA))
    requests = plain(SamplingParams(temperature=0.0, max_new_tokens=200, grammar=schema))
    grammar = {"use": "llguidance"}
    found = answers(model, requests, DEVICE, grammar=grammar, scheduler={"loop": loop})
    assert found == answers(model, requests, "cpu", grammar=grammar)


def picture(seed: int, height: int, width: int) -> MediaInput:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return MediaInput(kind="image", data=file.getvalue())


def questions() -> list[GenerateRequest]:
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    pictures = picture(1, 60, 90), picture(2, 120, 100)
    texts = (f"What is this? {mark}", f"And {mark} or {mark}?", "Nothing to see.")
    asked = ((pictures[0],), pictures, ())
    return [
        GenerateRequest(
            prompt=MediaPrompt(base=f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", media=media),
            sampling=GREEDY,
        )
        for text, media in zip(texts, asked, strict=True)
    ]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "shapes"])
def test_pictures_are_seen_alike(tmp_path: Path, family: str, loop: str) -> None:
    model = SHAPES if family == "shapes" else vl_checkpoint(tmp_path, family)
    media = {"processor": {"use": "qwen_vl"}}
    found = answers(model, questions(), DEVICE, media=media, scheduler={"loop": loop, "chunked_prefill_size": 16})
    assert found == answers(model, questions(), "cpu", media=media)


def test_memory_that_is_not_there_is_an_error_at_the_start(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, "llama")
    with pytest.raises(PegboardError, match=r"memory\.max_total_tokens"):
        answers(model, plain(), DEVICE, memory={"max_total_tokens": 2**40})


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU's memory is not shared out")
def test_kv_is_sized_by_what_is_free(tmp_path: Path) -> None:
    """Half of that is taken already, by this process."""
    model = tiny_checkpoint(tmp_path, "llama")
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(free // 2, dtype=torch.uint8, device=DEVICE)
    found = answers(model, plain(), DEVICE, memory={"max_total_tokens": None})
    assert found == answers(model, plain(), "cpu")
    del taken


BREAKS = """
import torch

from pegboard.core.interfaces import LogitsProcessor, Plugin, Provider


class Breaks(LogitsProcessor):
    def wants(self, params):
        return params.max_new_tokens == 13

    def prepare(self, rows):
        return True

    def apply(self, logits, state):
        far = torch.full((1,), 10**9, device=logits.device)
        logits += torch.zeros(4, device=logits.device)[far]


plugin = Plugin("breaks", "1", providers=(Provider("logits_processor", "breaks", "breaks_plugin:Breaks", "breaks it"),))
"""


def test_a_device_that_fails_is_started_anew(tmp_path: Path) -> None:
    """A kernel that reads outside of its memory takes the device's context with it, and with that the process."""
    info = tmp_path / "site" / "breaks-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: breaks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pegboard]\nbreaks = breaks_plugin:plugin\n")
    (tmp_path / "site" / "breaks_plugin.py").write_text(BREAKS)
    config = {
        "model": {"path": str(tiny_checkpoint(tmp_path, "llama")), "device": DEVICE, "dtype": "float32"},
        "memory": {"max_total_tokens": 4096},
        "runner": {"use": "layered"},
        "logits_processors": ["breaks"],
    }
    paths = [str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with serving(config, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}) as server:

        def ask(tokens: int) -> httpx.Response:
            sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens}
            body = {"input_ids": [5, 6, 7], "sampling_params": sampling}
            return httpx.post(f"{server.address}/generate", json=body, timeout=100)

        first = ask(5)
        assert first.status_code == 200, first.text
        broken = ask(13)
        assert broken.status_code == (500 if DEVICE == "cpu" else 503), broken.text
        until = time.monotonic() + 60
        while (again := ask(5)).status_code == 503:
            assert time.monotonic() < until, server.log()
            time.sleep(0.1)
        assert again.json()["output_ids"] == first.json()["output_ids"]
        assert ("does not recover" in server.log()) == (DEVICE != "cpu")
