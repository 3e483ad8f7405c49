"""How near the engine is to transformers, by benchmarks/accuracy: on the demo model and on tiny checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import accuracy
from benchmarks.accuracy import Agreement, KVPrecision, Perplexity
from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.errors import PegboardError

WIDE: dict[str, Any] = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2},
    "qwen3": WIDE,
    "mistral": {**WIDE, "sliding_window": 50},
}


@pytest.mark.full
@pytest.mark.slow
def test_the_demo_model_agrees_with_transformers_within_the_noise_of_bf16() -> None:
    """Teacher-forced agreement at 1 and at 32 streams, and perplexity in chunks within 0.5%, by the runner that `auto`
    chooses.
    """
    found = accuracy.measure(accuracy.DEMO, ("agreement", "perplexity"), [])
    said = "\n".join(accuracy.lines(found))
    assert [one["streams"] for one in found["agreement"]] == [1, 32]
    assert all(one["ok"] for one in found["agreement"]), said
    assert found["perplexity"]["tokens"] > 2500
    assert found["perplexity"]["ok"], said


@pytest.mark.parametrize("architecture", MODELS)
def test_tiny_models_choose_what_transformers_choose(tmp_path: Path, architecture: str) -> None:
    checkpoint = tiny_checkpoint(tmp_path, architecture, **MODELS[architecture])
    exact, bf16 = (accuracy.Reference(checkpoint, dtype) for dtype in ("float32", "bfloat16"))
    draw = np.random.default_rng(3)
    with Engine.from_config(accuracy.config(str(checkpoint), 4096)) as engine:
        prompts = [draw.integers(3, engine.info.vocab_size, size=n).tolist() for n in (5, 33, 70, 120) * 4]
        found = accuracy.agreement(engine, prompts, 24, exact, bf16)
    assert found.tokens == 16 * 24
    assert found.bf16_error > 0, "the references differ, or nothing is measured"
    assert found.ok, found


def test_perplexity_is_that_of_the_logits(tmp_path: Path) -> None:
    """In float32 by the layered runner, where only the order of sums differs; over several pieces of rows."""
    checkpoint = tiny_checkpoint(tmp_path, "llama")
    exact = accuracy.Reference(checkpoint, "float32")
    ids = np.random.default_rng(4).integers(3, 300, size=2 * accuracy.ROWS + 50).tolist()
    settings = ["model.dtype=float32", "runner.use=layered", "scheduler.chunked_prefill_size=100"]
    with Engine.from_config(accuracy.config(str(checkpoint), 2048), overrides=settings) as engine:
        found = accuracy.perplexity(engine, ids, exact, exact)
    assert found.tokens == len(ids) - 1
    assert found.ours == pytest.approx(found.float32, rel=1e-4)
    assert found.ok


def test_kv_of_eight_bits_is_compared_with_bfloat16(tmp_path: Path) -> None:
    """By the same runner, over the same tokens; the two types round differently."""
    checkpoint = tiny_checkpoint(tmp_path, "llama")
    ids = np.random.default_rng(4).integers(3, 300, size=200).tolist()
    found = {}
    for kv in ("fp8_e4m3", "fp8_e5m2"):
        settings = ["attention.use=torch", f"memory.kv_dtype={kv}"]
        with Engine.from_config(accuracy.config(str(checkpoint), 2048), overrides=settings) as engine:
            found[kv] = accuracy.kv_precision(str(checkpoint), engine, ids, settings)
    assert len({found["fp8_e4m3"].ours, found["fp8_e5m2"].ours, found["fp8_e4m3"].bfloat16}) == 3
    assert found["fp8_e4m3"].bfloat16 == found["fp8_e5m2"].bfloat16
    assert {(one.bytes * 2, one.dtype) for one in found.values()} == {
        (one.bfloat16_bytes, kv) for kv, one in found.items()
    }


def test_what_is_outside_of_the_limits() -> None:
    within = Agreement(32, 1000, 0.04, 0.04, 20, 26, 0.2, 0.19, 29)
    assert within.ok
    for worse in (
        Agreement(32, 1000, 0.06, 0.04, 20, 26, 0.2, 0.19, 29),
        Agreement(32, 1000, 0.04, 0.04, 60, 26, 0.2, 0.19, 29),
        Agreement(32, 1000, 0.04, 0.04, 20, 26, 0.5, 0.19, 29),
        Agreement(32, 1000, 0.04, 0.04, 20, 26, 0.2, 0.19, 90),
    ):
        assert not worse.ok
    assert Perplexity(100, 10.04, 10.0, 10.02).ok
    assert not Perplexity(100, 10.06, 10.0, 10.06).ok
    assert not Perplexity(100, 9.94, 10.0, 9.94).ok
    assert KVPrecision("fp8_e4m3", 10.09, 10.0, 64, 128).ok
    assert not KVPrecision("fp8_e4m3", 10.11, 10.0, 64, 128).ok
    assert not KVPrecision("fp8_e4m3", 10.0, 10.0, 65, 128).ok


def test_another_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(accuracy.text()) > 10_000
    other = tmp_path / "prose.txt"
    other.write_text(accuracy.text() + " ", "utf-8")
    monkeypatch.setattr(accuracy, "TEXT", other)
    with pytest.raises(PegboardError, match="was changed"):
        accuracy.text()


def test_windows_are_spread_and_differ() -> None:
    found = accuracy.windows(list(range(1000)), 4, 100)
    assert [one[0] for one in found] == [0, 225, 450, 675]
    assert {len(one) for one in found} == {100}
