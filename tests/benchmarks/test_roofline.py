"""benchmarks/roofline: what a step must read and multiply, and the compiled loops."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmarks import roofline
from benchmarks.roofline import Shape
from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.interfaces.errors import PegboardError
from pegboard.plugins.cpu_native.library import NativeError, compiler, cpu_flags

SMOLLM2 = Shape(weights=134_515_008, head=49152 * 576, kv_numbers=2 * 30 * 3 * 64, heads_width=30 * 9 * 64)


def test_what_a_decode_step_of_the_demo_model_reads() -> None:
    """269 MB of bf16 weights, and 23 kB for each token of context: the figures of the shared facts."""
    assert SMOLLM2.weights * 2 == pytest.approx(269e6, rel=1e-3)
    assert SMOLLM2.kv_bytes(32, 200) == 32 * 200 * 23040


def test_a_decode_step_multiplies_for_each_request() -> None:
    step = 2 * SMOLLM2.weights + 4 * 200 * SMOLLM2.heads_width
    assert SMOLLM2.decode_operations(1, 200) == step
    assert SMOLLM2.decode_operations(32, 200) == 32 * step


def test_a_prefill_multiplies_by_the_head_once() -> None:
    one = SMOLLM2.prefill_operations(1)
    assert one == pytest.approx(2 * SMOLLM2.weights, rel=1e-3)
    assert SMOLLM2.prefill_operations(512) == pytest.approx(
        2 * 512 * (SMOLLM2.weights - SMOLLM2.head) + 2 * SMOLLM2.head + 2 * 512 * 513 * SMOLLM2.heads_width
    )


@pytest.mark.parametrize(("architecture", "tied"), [("qwen3", True), ("llama", False)])
def test_the_shape_is_that_of_the_checkpoint(tmp_path: Path, architecture: str, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = tiny_checkpoint(tmp_path, architecture)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    parameters = sum(one.numel() for one in model.parameters())
    embedding = model.get_input_embeddings().weight.numel()
    found = Shape.of(checkpoint)
    assert found.weights == (parameters if tied else parameters - embedding)
    assert found.head == embedding
    assert found.kv_numbers == 2 * 3 * 2 * 16, "3 layers, 2 kv heads of 16"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        compiler()
    except NativeError as error:
        pytest.skip(str(error))
    return roofline.compile_loop(tmp_path_factory.mktemp("roofline"), cpu_flags())


@pytest.mark.parametrize("threads", [1, 2])
def test_the_loops_run(program: Path, threads: int) -> None:
    for huge in (False, True):
        found = roofline.bandwidth(program, 8, threads, huge, 0.02)
        assert found.gigabytes_per_s > 0
        assert huge or not found.in_huge_pages
    rate, unit = roofline.multiply(program, threads, 0.02)
    assert rate > 0
    assert ("AMX" in unit) == ("amx_bf16" in cpu_flags())


def test_a_failed_compile_shows_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/bin/no-such-compiler")
    with pytest.raises(PegboardError, match="compiler"):
        roofline.compile_loop(tmp_path, frozenset())


@pytest.mark.parametrize(("bits", "told", "expected"), [(None, 0.6, 9.6), (None, None, 16.0), (4.0, 0.6, 4.0)])
def test_a_table_of_all_steps(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    program: Path,
    bits: float | None,
    told: float | None,
    expected: float,
) -> None:
    """With the engine's part replaced: limits and shares, from the same numbers. `told` are the weights that the runner
    speaks of, as a part of those in bf16.
    """
    checkpoint = tiny_checkpoint(tmp_path, "llama")
    in_bf16 = Shape.of(checkpoint).weights * 2
    took: dict[str, Any] = {
        "stages_ms": {"forward": {"median": 20.0, "min": 16.0}},
        "total_ms": {"median": 22.0, "min": 18.0},
    }
    took["weight_bytes"] = None if told is None else told * in_bf16
    asked: list[tuple[Any, ...]] = []

    def step(model: str, overrides: Any, *shape: Any) -> dict[str, Any]:
        asked.append(shape)
        return took

    monkeypatch.setattr(roofline, "step", step)
    monkeypatch.setattr(roofline, "compile_loop", lambda folder, flags: program)
    monkeypatch.setattr(roofline, "SIZES_MB", ())
    args = argparse.Namespace(
        model=str(checkpoint), overrides=[], bits=bits, seconds=0.01, batch=[1, 32], context=100, prefill=64
    )
    found = roofline.measure(args, lambda text: None)
    assert found["bits_per_weight"] == pytest.approx(expected)
    one = found["decode"][1]
    assert one["weight_bytes"] == pytest.approx(in_bf16 * expected / 16)
    reading = (one["weight_bytes"] + one["kv_bytes"]) / one["gigabytes_per_s"] / 1e6
    multiplying = one["operations"] / found["multiply"]["giga_operations_per_s"] / 1e6
    assert one["limit_ms"] == pytest.approx(max(reading, multiplying))
    assert one["limit_by"] == ("reading" if reading > multiplying else "multiplying")
    assert one["share_of_limit"] == pytest.approx(one["limit_ms"] / 20.0)
    assert [shape[3] for shape in asked] == [1, 32, 1]
    text = "\n".join(roofline.table(found))
    assert "20.00 (16.00) | 22.00" in text
    assert text.count("\n|") == 5
