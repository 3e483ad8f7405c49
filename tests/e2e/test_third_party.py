"""A package that knows Pegboard, and that Pegboard does not know: really installed, checked, and served with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.servers import serving
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.sampling import SamplingParams

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "third_party_plugin"
PEGBOARD = str(Path(sys.executable).with_name("pegboard"))
PROVIDERS = {
    "schedule_policy": "shortest_prompt",
    "prefix_cache": "whole_prompt",
    "logits_processor": "no_repeat",
    "sampler": "top_n_sigma",
    "speculator": "bigrams",
    "admission_gate": "rate_limit",
    "api": "completion_lines",
    "tool_parser": "bracketed",
}
STEM = "one two three four five six seven eight nine ten "
PROMPTS = [f"{STEM}eleven", f"{STEM}twelve thirteen", "a server answers requests", STEM * 4]
LENGTH = 24
ALICE, BOB, ADMIN = "sk-alice", "sk-bob", "sk-admin"
BURST = 40
PATIENCE = 60.0

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that finds the example package, installed into a folder of its own."""
    folder = tmp_path_factory.mktemp("third-party")
    source, target = folder / "source", folder / "site"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("*.egg-info", "build"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--target", str(target), str(source)], check=True)
    return {**os.environ, "PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"}


def pegboard(*args: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PEGBOARD, *args], env=env, capture_output=True, text=True, check=False)


def test_all_are_listed(installed: dict[str, str]) -> None:
    done = pegboard("plugins", "list", "--json", env=installed)
    assert done.returncode == 0, done.stderr
    found = {one["contract"]: one for one in json.loads(done.stdout)["providers"] if "example" in one["from"]}
    assert {contract: one["provider"] for contract, one in found.items()} == PROVIDERS
    for one in found.values():
        assert (one["from"], one["problem"]) == ("pegboard-example-plugin 1.0.0", "")
        assert one["config"], "each has options"
        assert one["conformance"], "each names its tests"


def test_options_are_shown(installed: dict[str, str]) -> None:
    done = pegboard("plugins", "show", "example", env=installed)
    assert done.returncode == 0, done.stderr
    for key in ("scheduler.policy.bucket: int", "sampler.n: number", "gates[].burst: int", "tool_parser.begin: str"):
        assert key in done.stdout


def test_its_config_is_right(installed: dict[str, str]) -> None:
    config = EXAMPLE / "config.yaml"
    assert all(name in config.read_text("utf-8") for name in PROVIDERS.values())
    done = pegboard("config", "check", str(config), env=installed)
    assert (done.returncode, done.stdout[:17]) == (0, "ok (not checked: "), done.stderr


@pytest.mark.full
def test_all_conform(installed: dict[str, str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = pegboard("plugins", "check", "example", "--report", str(report), env=installed)
    assert done.returncode == 0, done.stdout + done.stderr
    entries = json.loads(report.read_text())["providers"]
    assert {one["provider"] for one in entries} == {*PROVIDERS.values()}
    assert {(one["distribution"], one["verdict"]) for one in entries} == {("pegboard-example-plugin", "passed")}


@pytest.mark.full
def test_its_own_tests_pass(installed: dict[str, str], tmp_path: Path) -> None:
    package = tmp_path / "package"
    shutil.copytree(EXAMPLE, package)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(package)]
    done = subprocess.run(command, cwd=package, env=installed, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


# ---- all eight in one server ----------------------------------------------------------------------------------------


class Served:
    """A server with all eight, as its clients see it."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client

    def post(self, path: str, *, key: str = ALICE, status: int = 200, **body: Any) -> Any:
        response = self.client.post(path, json=body, headers={"authorization": f"Bearer {key}"})
        assert response.status_code == status, response.text
        return response.json()

    def ids(self, prompt: str, **sampling: Any) -> list[int]:
        """Tokens of an answer that nothing but its length ends."""
        said = {"max_new_tokens": LENGTH, "ignore_eos": True, "temperature": 0, **sampling}
        found: list[int] = self.post("/generate", text=prompt, sampling_params=said)["output_ids"]
        return found

    def lines(self, *, key: str = ALICE, **body: Any) -> Iterator[dict[str, Any]]:
        """The lines of a stream, as they come; who stops reading leaves."""
        headers = {"authorization": f"Bearer {key}"}
        with self.client.stream("POST", "/lines", json=body, headers=headers) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"] == "application/x-ndjson"
            yield from map(json.loads, response.iter_lines())

    def info(self) -> dict[str, Any]:
        response = self.client.get("/server_info", headers={"authorization": f"Bearer {ADMIN}"})
        return dict(response.raise_for_status().json())

    def wait_for(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The scheduler's state as soon as it is so."""
        end = time.monotonic() + PATIENCE
        while not condition(now := self.info()["scheduler"]):
            assert time.monotonic() < end, f"it does not happen: {now}"
            time.sleep(0.02)
        return now


def is_idle(now: dict[str, Any]) -> bool:
    return not any(now[f"{state}_requests"] for state in ("running", "waiting", "blocked", "held"))


def complete(server: Served, prompt: str) -> str:
    """Through OpenAI's route."""
    answer = server.post("/v1/completions", model="", prompt=prompt, max_tokens=LENGTH, temperature=0)
    return str(answer["choices"][0]["text"])


def read_lines(server: Served, prompt: str) -> str:
    """Through the package's own."""
    *pieces, last = server.lines(text=prompt, max_tokens=LENGTH, temperature=0)
    assert last["tokens"] <= LENGTH
    return "".join(one["piece"] for one in pieces)


def leave(server: Served, prompt: str) -> None:
    """Begin to read a long answer, and leave in the middle."""
    lines = server.lines(text=prompt, max_tokens=3000, temperature=0.9, ignore_eos=True)
    first, second = next(lines), next(lines)
    assert first["piece"]
    assert second["piece"]
    lines.close()  # type: ignore[attr-defined]


def call(server: Served) -> list[tuple[str, Any]]:
    """The calls of an answer that has to be some, as the parser's grammar forces and the parser reads it."""
    city = {"city": {"enum": ["Rome"]}}
    schema = {"type": "object", "properties": city, "required": ["city"], "additionalProperties": False}
    answer = server.post(
        "/v1/chat/completions",
        model="",
        messages=[{"role": "user", "content": "How is the weather?"}],
        tools=[{"type": "function", "function": {"name": "weather", "parameters": schema}}],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=200,
        temperature=0,
    )
    message = answer["choices"][0]["message"]
    assert not message["content"], "markers are no content"
    return [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in message["tool_calls"]]


def twenty_at_once(server: Served, expected: dict[str, str]) -> None:
    """Eight at a time, on all ways, four of them cut off by their clients."""
    jobs: list[Callable[[], Any]] = []
    answers: list[Any] = []
    for prompt in PROMPTS:
        jobs += [
            lambda prompt=prompt: read_lines(server, prompt),  # type: ignore[misc]
            lambda prompt=prompt: leave(server, prompt),  # type: ignore[misc]
            lambda prompt=prompt: complete(server, prompt),  # type: ignore[misc]
            lambda prompt=prompt: read_lines(server, prompt),  # type: ignore[misc]
            lambda: call(server),
        ]
        answers += [expected[prompt], None, expected[prompt], expected[prompt], [("weather", {"city": "Rome"})]]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda job: job(), jobs))
    assert len(found) == 20
    assert found == answers


def parameters_take_effect(server: Served) -> None:
    """Those of the sampler and of the processor, each alone and both together."""
    prompt = PROMPTS[0]
    greedy = server.ids(prompt)
    hot = {"temperature": 1.0, "seed": 7}
    narrow, once = {"top_n_sigma": {"n": 0.0001}}, {"no_repeat": {"size": 1}}
    assert server.ids(prompt, **hot) != greedy
    assert server.ids(prompt, **hot, custom_params=narrow) == greedy, "next to no deviation leaves the largest logit"
    assert len(set(greedy)) < LENGTH, "this proves nothing where no token comes twice anyway"
    distinct = server.ids(prompt, custom_params=once)
    assert len(set(distinct)) == LENGTH
    assert server.ids(prompt, **hot, custom_params={**narrow, **once}) == distinct
    for said, field in (({"no_repeat": {}}, "no_repeat"), ({"top_n_sigma": {"n": -1}}, "top_n_sigma.n")):
        refused = server.post("/lines", status=400, text=prompt, custom_params=said)
        assert refused["field"] == f"custom_params.{field}"


def drafts_are_verified(server: Served) -> None:
    """An answer of few different tokens repeats itself, which is what the speculator drafts by."""
    said = {"max_new_tokens": 200, "ignore_eos": True, "temperature": 0, "regex": "[ab]{999}"}
    told = server.post("/generate", text=PROMPTS[3], sampling_params=said)["meta_info"]
    assert told["spec_draft_token_num"] >= told["spec_accept_token_num"] > 0, told
    assert told["spec_verify_ct"] < 200


def keys_have_limits(server: Served) -> None:
    """One key's burst, one that waits until its client leaves, and two too many; another key goes on meanwhile."""
    server.post("/v1/completions", key=BOB, model="", prompt=["a"] * BURST, max_tokens=1)
    headers = {"authorization": f"Bearer {BOB}"}
    with server.client.stream("POST", "/lines", json={"text": "b"}, headers=headers) as waiting:
        assert waiting.status_code == 200
        [blocked] = server.wait_for(lambda now: bool(now["blocked_requests"]))["gates"]
        assert blocked["gate"] == "rate_limit"
        refused = server.post("/lines", key=BOB, status=429, text="c")
        assert refused["code"] == "rate_limit_exceeded"
        refused = server.post("/v1/completions", key=BOB, status=429, model="", prompt="c")
        assert "requests per second" in refused["error"]["message"]
        assert complete(server, "d")


def test_all_eight_serve_together(installed: dict[str, str], tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, "llama")
    plain = {
        "model": {"path": str(model), "dtype": "float32"},
        "memory": {"max_total_tokens": 8192, "page_size": 4},
    }
    with Engine.from_config(plain) as engine:
        outputs = engine.generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=LENGTH))
    expected = {prompt: output.text for prompt, output in zip(PROMPTS, outputs, strict=True)}
    assert len({*expected.values()}) == len(PROMPTS)
    keys = tmp_path / "keys"
    keys.write_text(f"alice: {ALICE}\nbob: {BOB}\n", encoding="ascii")
    keys.chmod(0o600)
    config = {
        **plain,
        "scheduler": {"policy": {"use": "shortest_prompt", "bucket": 4}},
        "prefix_cache": {"use": "whole_prompt"},
        "logits_processors": ["no_repeat"],
        "sampler": {"use": "top_n_sigma"},
        "speculation": {"use": "bigrams", "nodes": 6, "adaptive": False},
        "gates": [{"use": "rate_limit", "per_second": 0.001, "burst": BURST, "waiting": 1}],
        "tool_parser": {"use": "bracketed"},
        "apis": ["openai", "native", "completion_lines"],
        "server": {"api_key_file": str(keys), "admin_key": ADMIN},
    }
    with (
        serving(config, env=installed) as running,
        httpx.Client(base_url=running.address, timeout=PATIENCE) as client,
    ):
        server = Served(client)
        chosen = server.info()["providers"]
        assert all(name in chosen[contract] for contract, name in PROVIDERS.items() if contract != "api"), chosen
        twenty_at_once(server, expected)
        parameters_take_effect(server)
        drafts_are_verified(server)
        keys_have_limits(server)

        now = server.wait_for(is_idle)
        assert now["aborted"] >= 4, "who was left has been stopped"
        assert now["cached_tokens"] > 0, "shared beginnings are found"
        assert (now["book_errors"], now["failed_batches"], now["plugin_failures"]) == (0, 0, 0)
        assert (now["locked_tokens"], now["held_tokens"]) == (0, 0)
        assert now["free_tokens"] + now["cached_tokens_now"] == now["total_tokens"]
        assert now["cached_tokens_now"] > 0
        server.post("/flush_cache", key=ADMIN)
        assert server.info()["scheduler"]["free_tokens"] == now["total_tokens"]
