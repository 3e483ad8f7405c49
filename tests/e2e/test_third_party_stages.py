"""A package that brings a stage of each kind from outside, really installed, in an engine with everything built in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from tests.e2e.test_third_party import EXAMPLE, installed

__all__ = ["installed"]

MOST_LINES = 60
GAME = """
import json, random, sys
from pegboard import Engine
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.sampling import SamplingParams

config, stages = json.loads(sys.argv[1]), json.loads(sys.argv[2])
limited = SamplingParams(max_new_tokens=12, ignore_eos=True)
sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
rng = random.Random(7)
prompts = [[rng.randrange(3, 60) for _ in range(rng.randint(2, 30))] for _ in range(40)]
told = {}
for name, plugins in (("without", {}), ("with", {"example_stages": stages})):
    with Engine.from_config({**config, "plugins": plugins}) as engine:
        params = {"entropy": True} if plugins else {}
        answers = [engine.generate(prompt, sampling, params=params) for prompt in prompts[:4]]
        told[name] = [answer.token_ids for answer in answers]
        if plugins:
            told["entropy"] = [answer.extra["entropy"] for answer in answers]
            late = engine.generate(prompts[0], {**sampling, "max_new_tokens": 4000}, params={"seconds": 0.2})
            told["seconds"] = len(late.token_ids)
            try:
                engine.generate(prompts[0], sampling, params={"seconds": 0})
            except Exception as error:
                told["refused"] = str(error)
        rids = [engine.submit(GenerateRequest(prompt=prompt, sampling=limited, params=params)) for prompt in prompts]
        left = set(rids)
        for rid in rids[::4]:
            left -= {chunk.rid for chunk in engine.poll() if chunk.finish_reason is not None}
            engine.abort(rid)
            left.discard(rid)
        for _ in range(5000):
            left -= {chunk.rid for chunk in engine.poll() if chunk.finish_reason is not None}
        told[f"left {name}"] = len(left)
        stats = engine.stats()
        told[f"figures {name}"] = {key: value for key, value in stats.items() if isinstance(value, int | float)}
print(json.dumps(told))
"""

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_stages_from_outside_take_part(loop: str, installed: dict[str, str], tmp_path: Path) -> None:
    """They change no token, say what they are to say, and leave the books right: 40 requests, ten of them aborted."""
    model = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=2)
    config = {
        "model": {"path": str(model), "dtype": "float32", "device": "cpu", "context_length": 4096},
        "memory": {"max_total_tokens": 8192},
        "scheduler": {"loop": loop, "max_running_requests": 8},
        "log_level": "error",
    }
    stages = {"every": 3, "phrases": {str(token): [token % 50 + 1, 7] for token in range(60)}}
    command = [sys.executable, "-c", GAME, json.dumps(config), json.dumps(stages)]
    done = subprocess.run(command, env=installed, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["with"] == told["without"]
    assert [len(one) for one in told["entropy"]] == [12] * 4
    assert all(0 <= value <= 12 for one in told["entropy"] for value in one)
    assert 0 < told["seconds"] < 4000
    assert "params.seconds must be above 0" in told["refused"]
    figures = told["figures with"]
    assert figures["kv_checked"] > 10
    assert figures["kv_changed"] == 0
    for name in ("with", "without"):
        figures = told[f"figures {name}"]
        assert told[f"left {name}"] == 0
        assert [figures[key] for key in ("book_errors", "held_tokens", "locked_tokens", "failed_batches")] == [0] * 4


def test_each_has_few_lines() -> None:
    files = [*(EXAMPLE / "src" / "pegboard_example_plugin" / "stages").glob("*.py")]
    assert len(files) == 7
    assert {path.name: lines for path in files if (lines := len(path.read_text().splitlines())) > MOST_LINES} == {}
