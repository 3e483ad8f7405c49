"""What the command line says besides `--set`: a model, config files, short options."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegboard.core.config.arguments import read_options
from pegboard.core.config.compose import ResolvedConfig, compose
from pegboard.core.interfaces.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "server.yaml"
    path.write_text("model: {path: of/file, dtype: float32}\nserver: {port: 1}\n")
    return path


def path_of(resolved: ResolvedConfig) -> tuple[str, str]:
    return resolved.engine.model.path, resolved.origins["model.path"]


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "demo:smollm2-135m-instruct", "/m/a.gguf", "s3://bucket/it/", "."])
def test_what_is_no_config_file_is_the_model(name: str) -> None:
    assert path_of(compose([name], env={})) == (name, "argument")


def test_it_wins_over_files_and_environment_and_not_over_overrides(file: Path) -> None:
    env = {"PEGBOARD__MODEL__PATH": "of/environment"}
    orders: list[list[str | Path]] = [[file, "org/it"], ["org/it", file]]
    for arguments in orders:
        resolved = compose(arguments, env=env)
        assert path_of(resolved) == ("org/it", "argument")
        assert resolved.engine.model.dtype == "float32"
    assert path_of(compose([file, "org/it"], env=env, overrides=["model.path=b"])) == ("b", "--set")


def test_a_directory_is_a_model_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "model.json").mkdir()
    assert path_of(compose([tmp_path / "model.json"], env={}))[0] == str(tmp_path / "model.json")


def test_two_models_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.path: 'a/b' and 'c/d' are two models, and a server has one"):
        compose(["a/b", "c/d"], env={})


def test_short_options(file: Path) -> None:
    options = [("--port", "server.port", 8000), ("--host", "server.host", None)]
    resolved = compose([file], env={"PEGBOARD__SERVER__PORT": "2"}, options=[read_options(options)])
    assert (resolved.engine.server.port, resolved.origins["server.port"]) == (8000, "--port")
    assert resolved.engine.server.host == "127.0.0.1"
    wrong = [("--port", "server.port", 70000)]
    with pytest.raises(ConfigError, match=r"server\.port: 70000 is wrong: .* \[--port\]"):
        compose([file], env={}, options=[read_options(wrong)])
