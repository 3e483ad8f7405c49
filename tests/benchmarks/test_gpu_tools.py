"""What runs on a lent GPU is rehearsed here: the packages that travel, the model, the loads, the sweeps."""

from __future__ import annotations

import re
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu import (
    flashinfer_slim,
    load_row,
    loading,
    make_model,
    profile_prefill,
    profile_step,
    site,
    smoke,
    tune_attn,
)
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.paged import Paged
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.plugins.attn_torch.backend import TorchAttention

ROOT = Path(__file__).parents[2]

IMAGE = {
    *(
        "click",
        "filelock",
        "hf-xet",
        "huggingface-hub",
        "idna",
        "certifi",
        "jinja2",
        "markupsafe",
        "numpy",
        "packaging",
    ),
    *(
        "packaging",
        "pygments",
        "pyyaml",
        "requests",
        "safetensors",
        "setuptools",
        "tokenizers",
        "torch",
        "tqdm",
        "transformers",
    ),
    *("triton", "zipp"),
}
"""Of what the machine has that is lent, as its page lists: packages that those of the server need."""


def wheels() -> set[str]:
    """Return the names in the Makefile's GPU_WHEELS."""
    found = re.search(r"^GPU_WHEELS := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.M)
    assert found is not None
    return set(found[1].replace("\\\n", " ").split())


def test_wheels_that_travel_have_all_that_they_need() -> None:
    """Found on the machine itself it would have cost the run: fastapi had come to need another package."""
    names = wheels()
    missing = {
        f"{name} needs {requirement.name}"
        for name in names
        for requirement in map(Requirement, metadata.requires(name) or ())
        if requirement.marker is None or requirement.marker.evaluate({"python_version": "3.12", "extra": ""})
        if canonicalize_name(requirement.name) not in names | IMAGE
    }
    assert not missing


def test_the_project_needs_nothing_else() -> None:
    lines = [line for line in metadata.requires("pegboard") or () if "extra" not in line]
    needed = {canonicalize_name(Requirement(line).name) for line in lines}
    assert needed <= wheels() | IMAGE


def test_the_tree_is_importable_with_its_entry_points(tmp_path: Path) -> None:
    site.install(ROOT, tmp_path)
    (distribution,) = metadata.distributions(path=[str(tmp_path)])
    assert distribution.metadata["Name"] == "pegboard"
    found = {(entry.group, entry.name) for entry in distribution.entry_points}
    assert found >= {("pegboard", "attn_triton"), ("console_scripts", "pegboard"), ("pytest11", "pegboard")}
    text = (tmp_path / "sitecustomize.py").read_text().replace("sys.meta_path.append(Finder)", "")
    names: dict[str, Any] = {}
    exec(compile(text, "sitecustomize.py", "exec"), names)
    spec = names["Finder"].find_spec("pegboard.core")
    assert spec.origin == str(ROOT / "core" / "__init__.py")
    assert names["Finder"].find_spec("json") is None


def test_a_made_model_is_served(tmp_path: Path) -> None:
    make_model.main(["tiny", str(tmp_path)])
    with Engine.from_config({"model": {"path": str(tmp_path)}, "memory": {"max_total_tokens": 256}}) as engine:
        (answer,) = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True))
    assert len(answer.token_ids) == 4
    assert answer.text


def test_a_line_of_a_load() -> None:
    latency = {"ttft_ms": {"p50": 27.0, "p99": 28.0}, "itl_ms": None}
    found = {"output_throughput": 158.2, "input_throughput": 1260.0, **latency}
    line = load_row.line(found, "8b", "64")
    assert "8b   64 streams: out      158 tok/s" in line
    assert "TTFT p50    27.0 p99    28.0 ms" in line
    assert "ITL p99    nan ms" in line


def test_wrong_attention_is_seen() -> None:
    """By the first and the last request, decoding and not, also over KV of 8 bits."""
    bench = Bench(dry=True)
    for new, kept in ((1, None), (5, None), (1, torch.float8_e4m3fn)):
        paged = Paged(bench, [40, 33, 20], new=new, page_size=4, kv_dtype=kept)
        with torch.inference_mode():
            out = paged.call(TorchAttention(NoOptions(), paged.ctx))()
        assert paged.error(out) < tune_attn.MOST_ERROR
        for row in (0, -1):
            wrong = out.clone()
            wrong[(row if row else new - 1)] *= 1.1
            assert paged.error(wrong) > 2 * tune_attn.MOST_ERROR


def test_a_step_is_profiled(capsys: pytest.CaptureFixture[str]) -> None:
    profile_step.main(["2", "--dry-run"])
    assert "2 requests: wall" in capsys.readouterr().out


def test_different_answers_are_named() -> None:
    assert smoke.same([[1, 2], [3, 4]], [[1, 2], [3, 4]]) == ""
    assert smoke.same([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == "1 of 2 answers differ: 1@1"


@pytest.mark.full
def test_the_smoke_test_passes_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        smoke.main(["--device", "cpu", "--only", "llama"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.count("ok  ") == 15


def test_first_tokens_are_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model.make("tiny", tmp_path, with_weights=False)
    settings = ("model.use=dense", "model.load_format=dummy", "model.source.use=hf", "model.source.needs_weights=false")
    chosen = [word for setting in settings for word in ("--set", setting)]
    profile_prefill.main([str(tmp_path), "--device", "cpu", *chosen, "8", "40"])
    out = capsys.readouterr().out
    assert re.findall(r"^(\d+) tokens: wall", out, re.M) == ["8", "40"]
    assert "scheduler.py" in out, "the host's functions"


def wheel(path: Path, files: dict[str, str]) -> None:
    with zipfile.ZipFile(path, "w") as new:
        for name, text in files.items():
            new.writestr(name, text)


def test_a_repacked_wheel_has_what_it_includes(tmp_path: Path) -> None:
    record = "flashinfer-1.dist-info/RECORD"
    files = {
        "flashinfer/data/include/prefill.cuh": '#include "cutlass/util/line.h"\n#include <vector>\n',
        "flashinfer/data/cutlass/tools/util/include/cutlass/util/line.h": "",
        "flashinfer/data/csrc/fused_moe/large.cu": "",
        record: "flashinfer/data/csrc/fused_moe/large.cu,,\nflashinfer/data/include/prefill.cuh,,\n",
    }
    wheel(tmp_path / "whole.whl", files)
    flashinfer_slim.main([str(tmp_path / "whole.whl"), str(tmp_path / "slim")])
    with zipfile.ZipFile(tmp_path / "slim" / "whole.whl") as slim:
        assert set(slim.namelist()) == set(files) - {"flashinfer/data/csrc/fused_moe/large.cu"}
        assert slim.read(record) == b"flashinfer/data/include/prefill.cuh,,\n"
    assert len(list((tmp_path / "slim").iterdir())) == 1 + len(flashinfer_slim.UNUSED)


def test_a_repacked_wheel_that_lacks_a_header_is_refused(tmp_path: Path) -> None:
    files = {"flashinfer/data/csrc/page.cu": '#include "moe_page.cuh"\n', "flashinfer/data/csrc/moe_page.cuh": ""}
    wheel(tmp_path / "whole.whl", files)
    with pytest.raises(SystemExit, match=r"page\.cu includes moe_page\.cuh"):
        flashinfer_slim.main([str(tmp_path / "whole.whl"), str(tmp_path / "slim")])


def test_loading_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model.make("tiny", tmp_path)
    loading.main([str(tmp_path), "--device", "cpu"])
    assert len(re.findall(r"0\.00 GB in [\d.]+ s: [\d.]+ GB/s", capsys.readouterr().out)) == 3
