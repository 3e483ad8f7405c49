"""What is said of keys that there are not, and of other servers' names for those that there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs._build.config import builtin_registry
from pegboard.core.config.compose import compose
from pegboard.core.config.shape import Shape
from pegboard.core.config.suggest import known_option, other_servers, unread_variables
from pegboard.core.interfaces.errors import ConfigError, PluginError
from pegboard.core.interfaces.plugin import Plugin
from pegboard.core.registry.discovery import LoadedPlugin
from pegboard.core.registry.records import Origin
from pegboard.tools.config.describe import core_keys_of, option_keys


def test_every_answer_names_a_key_that_there_is_or_says_why_there_is_none() -> None:
    registry = builtin_registry()
    known = {key.path for key in core_keys_of(Shape.of(registry))}
    known |= {
        key.path for name in registry.contracts for record in registry.providers(name) for key in option_keys(record)
    }
    found = other_servers(Shape.of(registry))
    assert not {answer.key for answer in found.values() if answer.key} - known
    assert all(answer.key or answer.note for answer in found.values())
    assert len(found) >= 80


def test_a_plugin_brings_the_names_of_its_own_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it counts. What cannot be read is told with the plugin's name; the core's answers stay."""
    package = tmp_path / "acme_flags"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "names.yaml").write_text("acme_speed: {key: acme.speed}\nmax_model_len: {key: acme.length}\n")
    monkeypatch.syspath_prepend(tmp_path)

    def shape(table: str) -> Shape:
        return Shape(active=[LoadedPlugin(Plugin(name="acme", version="1", other_servers=table), Origin("acme", "1"))])

    assert known_option("--acme-speed", shape("acme_flags:names.yaml")) == "use --set acme.speed=..."
    assert known_option("--max-model-len", shape("acme_flags:names.yaml")) == "use --set model.context_length=..."
    assert known_option("--acme-speed") == ""
    with pytest.raises(PluginError, match=r"other_servers acme_flags:none\.yaml of plugin 'acme'.* cannot be read"):
        known_option("--acme-speed", shape("acme_flags:none.yaml"))


def problems(tmp_path: Path, text: str) -> dict[str, str]:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose([tmp_path / "a.yaml"], env={})
    return {one.path: one.message for one in caught.value.problems}


def test_a_file_in_the_spelling_of_another_server(tmp_path: Path) -> None:
    text = """
        model: Qwen/Qwen3-8B
        host: 0.0.0.0
        port: 8000
        tensor-parallel-size: 2
        max-model-len: 8192
        gpu_memory_utilization: 0.9
        enable-lora: true
        policy: fcfs
        storage: [files]
        max_runing_requests: 8
    """
    assert problems(tmp_path, text) == {
        "model": "'Qwen/Qwen3-8B' must be a section: keys and values, such as {path: Qwen/Qwen3-8B}",
        "host": "there is no such key; did you mean 'server.host'?",
        "port": "there is no such key; did you mean 'server.port'?",
        "tensor-parallel-size": "there is no such key; use parallel.tensor (on CPUs; docs/parallel.md)",
        "max-model-len": "there is no such key; use model.context_length",
        "gpu_memory_utilization": "there is no such key; use memory.gpu_share (of what the weights leave free)",
        "enable-lora": "there is no such key; use adapters.directories (docs/adapters.md)",
        "policy": "there is no such key; did you mean 'scheduler.policy'?",
        "storage": "there is no such key; did you mean 'memory.storage'?",
        "max_runing_requests": "there is no such key; did you mean 'scheduler.max_running_requests'?",
    }


def test_keys_of_a_section_come_first(tmp_path: Path) -> None:
    text = """
        model: {path: x, tensor_parallel_size: 2}
        server: {prot: 1, max-connections: 2, page_size: 3}
        attention: torch
        prefix_cache: {evction: lru}
    """
    assert problems(tmp_path, text) == {
        "model.tensor_parallel_size": "there is no such key; use parallel.tensor (on CPUs; docs/parallel.md)",
        "server.prot": "there is no such key; did you mean 'port'?",
        "server.max-connections": "there is no such key; did you mean 'max_connections'?",
        "server.page_size": "there is no such key; did you mean 'memory.page_size'?",
        "attention": "'torch' must be a section: keys and values, such as {use: torch}",
        "prefix_cache.evction": "there is no such key; did you mean 'eviction'?",
    }


def test_variables_with_too_few_underscores() -> None:
    found = unread_variables(
        {
            "PEGBOARD_SERVER_PORT": "31000",
            "PEGBOARD_MEMORY__PAGE_SIZE": "16",
            "PEGBOARD_API_KEY": "read by clients",
            "PEGBOARD_CACHE": "/cache",
            "PEGBOARD__SERVER__HOST": "::1",
            "PEGBOARD_LOG_LEVEL": "tcp://10.0.0.1:80 (a service of Kubernetes)",
        }
    )
    assert found == (
        "the variable PEGBOARD_MEMORY__PAGE_SIZE is not read; PEGBOARD__MEMORY__PAGE_SIZE sets memory.page_size",
        "the variable PEGBOARD_SERVER_PORT is not read; PEGBOARD__SERVER__PORT sets server.port",
    )


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--reasoning-parser", "use --set reasoning_parser.use=... (auto by default)"),
        ("--seed", "use --set scheduler.seed=..."),
        ("--random-seed", "use --set scheduler.seed=..."),
        ("--speculative-draft-model-path", "use --set speculation.draft=... (with speculation.use=eagle)"),
    ],
)
def test_flags_of_other_servers(flag: str, answer: str) -> None:
    """A parser's flag there is a section here: its name alone would say to set the section."""
    assert known_option(flag, Shape.of(builtin_registry()), close=False) == answer
