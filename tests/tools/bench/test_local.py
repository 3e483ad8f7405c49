"""``pegboard bench offline`` and ``step`` with a tiny model in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.vl_checkpoints import vl_checkpoint
from pegboard.core.cli.main import app
from pegboard.core.interfaces.errors import PegboardError
from pegboard.tools.bench.step import ENCODE, STAGES


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("bench"), "llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vl_checkpoint(tmp_path_factory.mktemp("bench"), "qwen3_vl")


def bench(command: str, model: Path, *options: str, code: int = 0) -> Any:
    """The JSON of a measurement."""
    sets = ["--set", f"model.path={model}", "--set", "runner.use=layered", "--set", "model.dtype=float32"]
    result = CliRunner().invoke(app, ["bench", command, *sets, "--json", "-", *options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


SHORT = ("--num-prompts", "6", "--input-len", "10", "--output-len", "4", "--set", "memory.max_total_tokens=2048")


class TestOffline:
    def test_all_at_once(self, model: Path) -> None:
        data = bench("offline", model, *SHORT, "--repeat", "2")
        run = data["median"]
        assert data["kind"] == "offline"
        assert (run["completed"], run["input_tokens"], run["output_tokens"]) == (6, 60, 24)
        assert (run["ttft_ms"], run["hit_rate"]) == (None, 0.0)
        # One prefill brings every first token, three decode steps the rest.
        assert (run["steps"]["prefill_steps"], run["steps"]["decode_steps"]) == (1, 3)
        assert sum(run["steps"]["seconds"].values()) == pytest.approx(run["duration_s"], abs=1e-4)
        assert data["engine"]["providers"]["runner"] == ["layered"]

    def test_some_at_a_time_as_they_come(self, model: Path) -> None:
        data = bench("offline", model, *SHORT, "--concurrency", "2", "--stream", "--save-requests")
        run = data["runs"][0]
        assert run["mean_concurrency"] <= 2.001
        assert run["steps"]["prefill_steps"] == 3
        assert run["tpot_ms"] is not None
        for one in run["records"]:
            assert sum(one["counts"]) == one["output_tokens"] == 4
            assert one["sent"] <= one["first"] <= one["end"]

    def test_conversations_find_themselves_in_the_cache(self, model: Path) -> None:
        data = bench("offline", model, *SHORT, "--workload", "multi-turn", "--turns", "3", "--save-requests")
        records = sorted(data["runs"][0]["records"], key=lambda one: (one["conversation"], one["turn"]))
        assert [one["input_tokens"] for one in records] == [10, 24, 38] * 2
        # All but the last token of what was said is known.
        assert [one["cached_tokens"] for one in records] == [0, 13, 27] * 2

    def test_a_file(self, model: Path, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text('{"prompt": "Hello", "output_len": 2}\n{"prompt": [5, 6, 7], "output_len": 3}\n')
        data = bench("offline", model, "--file", str(path), "--warmup", "0", "--set", "memory.max_total_tokens=2048")
        assert (data["median"]["output_tokens"], data["median"]["completed"]) == (5, 2)

    def test_a_request_that_cannot_be_served(self, model: Path, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text('{"prompt": [999999]}\n{"prompt": [5], "output_len": 2}\n')
        data = bench(
            "offline", model, "--file", str(path), "--warmup", "0", "--set", "memory.max_total_tokens=2048", code=1
        )
        assert (data["median"]["completed"], data["median"]["failed"]) == (1, 1)
        assert "999999" in data["median"]["errors"][0]["message"]


PICTURES = ("--workload", "images", "--images", "2", "--image-size", "96x64")


class TestOfflineWithPictures:
    def test_encoding_is_a_stage(self, seeing: Path) -> None:
        data = bench("offline", seeing, *SHORT, *PICTURES)
        run = data["median"]
        assert (run["completed"], run["output_tokens"]) == (6, 24)
        # A picture of 96 x 64 has six tokens.
        assert run["input_tokens"] > 6 * (10 + 2 * 6)
        steps = run["steps"]
        assert steps["encode_steps"] >= 1
        assert set(steps["seconds"]) == {"schedule", "forward", "results", "encode", "prepare", "other"}
        assert min(steps["seconds"].values()) > 0
        assert sum(steps["share"].values()) == pytest.approx(1, abs=0.01)
        assert steps["share"]["encode"] == pytest.approx(steps["seconds"]["encode"] / run["duration_s"], rel=0.01)

    def test_text_waits_for_no_media(self, seeing: Path) -> None:
        steps = bench("offline", seeing, *SHORT)["median"]["steps"]
        assert (steps["encode_steps"], steps["seconds"]["encode"]) == (0, 0)
        assert "prepare" not in steps["seconds"]

    def test_a_model_that_takes_none(self, model: Path) -> None:
        with pytest.raises(PegboardError, match="takes no pictures"):
            bench("offline", model, *SHORT, *PICTURES)


FEW = ("--repetitions", "3", "--warmup", "1")


class TestStep:
    @pytest.mark.parametrize(
        ("options", "tokens"),
        [
            (("--batch", "3", "--context", "20"), 3),
            (("--batch", "2", "--context", "0"), 2),
            (("--mode", "prefill", "--batch", "2", "--context", "0", "--extend", "9"), 18),
            (("--mode", "prefill", "--batch", "2", "--context", "12", "--extend", "9"), 18),
            (("--mode", "mixed", "--batch", "2", "--context", "12", "--extend", "9"), 11),
        ],
    )
    def test_shapes(self, model: Path, options: tuple[str, ...], tokens: int) -> None:
        data = bench("step", model, *FEW, *options)
        found = data["step"]
        assert (found["tokens"], found["repetitions"]) == (tokens, 3)
        assert tuple(found["stages_ms"]) == STAGES
        assert sum(one["min"] for one in found["stages_ms"].values()) <= found["total_ms"]["min"] + 0.001
        assert found["tokens_per_s"] == pytest.approx(tokens / found["total_ms"]["median"] * 1000, rel=0.01)
        assert 0 < found["total_ms"]["min"] <= found["total_ms"]["median"]

    def test_prompts_with_pictures(self, seeing: Path) -> None:
        """A picture of 96 x 64 has six tokens, and one before and after it."""
        shape = ("--mode", "prefill", "--batch", "2", "--context", "12", "--extend", "9", "--image-size", "96x64")
        one, two = (bench("step", seeing, *FEW, *shape, "--images", count)["step"] for count in ("1", "2"))
        assert two["tokens"] - one["tokens"] == 2 * 8
        assert one["tokens"] > 2 * (9 + 8)
        for found in (one, two):
            assert tuple(found["stages_ms"]) == ("plan", ENCODE, *STAGES[1:])
            assert found["stages_ms"][ENCODE]["min"] > 0
            assert sum(part["min"] for part in found["stages_ms"].values()) <= found["total_ms"]["min"] + 0.001

    def test_a_prompt_with_a_picture_beside_decodes(self, seeing: Path) -> None:
        shape = ("--mode", "mixed", "--batch", "2", "--context", "12", "--extend", "9")
        found = bench("step", seeing, *FEW, *shape, "--images", "1", "--image-size", "96x64")["step"]
        assert found["tokens"] > 2 + 9 + 8
        assert found["stages_ms"][ENCODE]["min"] > 0

    def test_nothing_is_encoded_in_a_decode_step(self, seeing: Path) -> None:
        with pytest.raises(PegboardError, match="--images is for --mode prefill and mixed"):
            bench("step", seeing, *FEW, "--images", "1")

    def test_a_context_that_is_not_in_the_cache(self, model: Path) -> None:
        options = ("--mode", "prefill", "--context", "12", "--extend", "4", "--set", "prefix_cache.use=none")
        with pytest.raises(
            PegboardError, match=r"the last one was 0 decodes and prefills of \[16\] tokens after \[0\]"
        ):
            bench("step", model, *FEW, *options)

    def test_too_many_at_once(self, model: Path) -> None:
        options = ("--batch", "4", "--set", "scheduler.max_running_requests=2")
        with pytest.raises(PegboardError, match="4 requests of 128 tokens do not run at once"):
            bench("step", model, *FEW, *options)

    def test_the_table_and_the_picture(self, model: Path, tmp_path: Path) -> None:
        sets = ["--set", f"model.path={model}", "--set", "runner.use=layered", "--plot", str(tmp_path / "p")]
        result = CliRunner().invoke(app, ["bench", "step", *sets, *FEW])
        assert result.exit_code == 0, result.output
        rows = [line.split()[0] for line in result.stdout.splitlines() if line]
        assert [row for row in rows if row in STAGES] == list(STAGES)
        assert (tmp_path / "p" / "step.png").read_bytes().startswith(b"\x89PNG")
