"""A format of weights in a package of its own: really installed, checked, and its checkpoint served."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from pegboard import Engine, SamplingParams
from pegboard.conformance.checkpoints import tiny_checkpoint, write_tiny_tokenizer
from pegboard.conformance.servers import serving
from pegboard.core.config.compose import compose

EXAMPLE = Path(__file__).parents[2] / "examples" / "weight_format"
SOURCE = EXAMPLE / "src" / "pegboard_halves"
PEGBOARD = str(Path(sys.executable).with_name("pegboard"))
TEXT = [*range(3, 43)]
NEW = 16

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example package, installed."""
    folder = tmp_path_factory.mktemp("weight-format")
    source, target = folder / "source", folder / "site"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("*.egg-info", "build"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--target", str(target), str(source)], check=True)
    return target


def environment(site: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}


def test_it_conforms(installed: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [PEGBOARD, "plugins", "check", "halves", "--report", str(report)]
    done = subprocess.run(command, env=environment(installed), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (entry,) = json.loads(report.read_text("utf-8"))["providers"]
    assert (entry["provider"], entry["verdict"]) == ("halves", "passed")


def test_the_format_is_short() -> None:
    lines = (SOURCE / "format.py").read_text("utf-8").splitlines()
    assert len(lines) <= 45


def test_its_checkpoint_is_served(installed: Path, tmp_path: Path) -> None:
    """By the native runner, with the answers of the checkpoint of its exact weights."""
    coded, meant = checkpoints(tmp_path)
    sections = {"memory": {"max_total_tokens": 256}, "runner": {"use": "cpu_native", "threads": 1}}
    with Engine(compose(data={"model": {"path": str(meant), "dtype": "bfloat16"}, **sections}, env={})) as engine:
        (expected,) = engine.generate([TEXT], SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True))
    config = {"model": {"path": str(coded), "dtype": "bfloat16"}, "apis": ["native"], **sections}
    sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    with (
        serving(config, env=environment(installed)) as server,
        httpx.Client(base_url=server.address, timeout=120, trust_env=False) as client,
    ):
        answer = client.post("/generate", json={"input_ids": TEXT, "sampling_params": sampling}).json()
        info = client.get("/server_info").json()
    assert answer["output_ids"] == expected.token_ids
    assert info["providers"]["weight_format"] == ["halves"]


def checkpoints(directory: Path) -> tuple[Path, Path]:
    """Return a tiny model in the format, and the one that it means."""
    written = runpy.run_path(str(SOURCE / "testing.py"))["written"]
    plain = tiny_checkpoint(directory / "plain", "llama", hidden_size=64, intermediate_size=160, num_attention_heads=4)
    write_tiny_tokenizer(plain)
    meant = load_file(plain / "model.safetensors")
    coded = dict(meant)
    for name in [name for name in meant if name.endswith("_proj.weight")]:
        parts, numbers = written(coded.pop(name).double(), 32)
        meant[name] = numbers.float()
        coded |= {f"{name.removesuffix('weight')}{end}": part.contiguous() for end, part in parts.items()}
    told = {"quantization_config": {"quant_method": "halves"}}
    config = json.loads((plain / "config.json").read_text("utf-8"))
    for part, tensors, further in (("coded", coded, told), ("meant", meant, {})):
        shutil.copytree(plain, directory / part, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        (directory / part / "config.json").write_text(json.dumps(config | further), "utf-8")
        save_file(tensors, directory / part / "model.safetensors", metadata={"format": "pt"})
    return directory / "coded", directory / "meant"
