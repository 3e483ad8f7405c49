"""A package that knows Pegboard, and that Pegboard does not know: really installed, checked, and served with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from pegboard.core.engine import Engine
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.testing.checkpoints import tiny_checkpoint
from pegboard.core.testing.servers import serving

ROOT = Path(__file__).parents[2]
PEGBOARD = str(Path(sys.executable).with_name("pegboard"))
STEM = "one two three four five six seven eight nine ten "
PROMPTS = [f"{STEM}eleven", f"{STEM}twelve thirteen", "a server answers requests", STEM * 4]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that finds the example package, installed into a folder of its own."""
    folder = tmp_path_factory.mktemp("third-party")
    source, target = folder / "source", folder / "site"
    shutil.copytree(
        ROOT / "examples" / "third_party_plugin", source, ignore=shutil.ignore_patterns("*.egg-info", "build")
    )
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--target", str(target), str(source)], check=True)
    return {**os.environ, "PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"}


def pegboard(*args: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PEGBOARD, *args], env=env, capture_output=True, text=True, check=False)


def test_it_is_listed(installed: dict[str, str]) -> None:
    done = pegboard("plugins", "list", "--json", env=installed)
    assert done.returncode == 0, done.stderr
    providers = {(one["contract"], one["provider"]): one for one in json.loads(done.stdout)["providers"]}
    for key in (("schedule_policy", "shortest_prompt"), ("prefix_cache", "whole_prompt")):
        assert (providers[key]["from"], providers[key]["problem"]) == ("pegboard-example-plugin 1.0.0", "")


def test_its_option_is_shown(installed: dict[str, str]) -> None:
    done = pegboard("plugins", "show", "shortest_prompt", env=installed)
    assert done.returncode == 0, done.stderr
    assert "scheduler.policy.bucket: int" in done.stdout


def test_its_config_is_right(installed: dict[str, str]) -> None:
    done = pegboard("config", "check", str(ROOT / "examples" / "third_party_plugin" / "config.yaml"), env=installed)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.parametrize("name", ["shortest_prompt", "whole_prompt"])
def test_it_conforms(name: str, installed: dict[str, str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = pegboard("plugins", "check", name, "--report", str(report), env=installed)
    assert done.returncode == 0, done.stdout + done.stderr
    (entry,) = json.loads(report.read_text())["providers"]
    assert (entry["provider"], entry["distribution"], entry["verdict"]) == (name, "pegboard-example-plugin", "passed")


def test_its_own_tests_pass(installed: dict[str, str], tmp_path: Path) -> None:
    package = tmp_path / "package"
    shutil.copytree(ROOT / "examples" / "third_party_plugin", package)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(package)]
    done = subprocess.run(command, cwd=package, env=installed, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def engine_config(folder: Path) -> dict[str, Any]:
    path = tiny_checkpoint(folder, "llama")
    return {"model": {"path": str(path), "dtype": "float32"}, "memory": {"max_total_tokens": 4096, "page_size": 4}}


SELECTED = {
    "prefix_cache": {"use": "whole_prompt"},
    "scheduler": {"policy": {"use": "shortest_prompt", "bucket": 4}},
}


def generate(address: str, prompt: str) -> dict[str, Any]:
    body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 24}}
    response = httpx.post(f"{address}/generate", json=body, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_it_serves_what_the_built_ins_serve(installed: dict[str, str], tmp_path: Path) -> None:
    config = engine_config(tmp_path)
    with Engine.from_config(config) as engine:
        expected = [
            engine.generate(prompt, SamplingParams(temperature=0, max_new_tokens=24)).text for prompt in PROMPTS
        ]
    assert len(set(expected)) == len(PROMPTS)
    with serving({**config, **SELECTED}, env=installed) as server:
        first = [generate(server.address, prompt) for prompt in PROMPTS]
        again = [generate(server.address, prompt) for prompt in PROMPTS]
        info = httpx.get(f"{server.address}/server_info").text
    assert [answer["text"] for answer in first] == expected
    assert [answer["text"] for answer in again] == expected
    assert first[1]["meta_info"]["cached_tokens"] > 0, "the shared beginning is found"
    assert all(answer["meta_info"]["cached_tokens"] > 0 for answer in again), "a repeated prompt is found"
    assert "whole_prompt" in info
    assert "shortest_prompt" in info
