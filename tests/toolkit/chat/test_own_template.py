"""A chat template of the operator's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegboard.conformance.checkpoints import write_tiny_tokenizer
from pegboard.core.config.compose import ResolvedConfig, compose
from pegboard.core.config.select import Selection
from pegboard.core.engine.source import PreparedModel, check_model, prepare_model
from pegboard.core.interfaces.errors import ConfigError


def prepared(directory: Path, template: Path) -> PreparedModel:
    resolved = configured(directory, template)
    return prepare_model(resolved, Selection(resolved))


def configured(directory: Path, template: Path) -> ResolvedConfig:
    (directory / "config.json").write_text("{}", "utf-8")
    (directory / "model.safetensors").touch()
    write_tiny_tokenizer(directory, chat_template="of the model")
    return compose(data={"model": {"path": str(directory), "chat_template": str(template)}}, env={})


def test_it_takes_the_place_of_the_models(tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("own {{ bos_token }} {{ messages[0].content }}", "utf-8")
    tokenizer = prepared(tmp_path, template).tokenizer
    assert dict(tokenizer.chat_templates) == {"default": template.read_text("utf-8")}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}]) == "own <|endoftext|> Hi"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "own.jinja cannot be read: No such file or directory; name a file with a Jinja template"),
        (b" \n", "own.jinja is empty"),
        (b"\xff\xfe", "own.jinja is not UTF-8"),
        (b"{% for %}", "own.jinja: .*template"),
    ],
)
def test_what_is_wrong_with_it_is_said_at_the_start(tmp_path: Path, data: bytes | None, words: str) -> None:
    template = tmp_path / "own.jinja"
    if data is not None:
        template.write_bytes(data)
    with pytest.raises(ConfigError, match=words) as error:
        prepared(tmp_path, template)
    assert error.value.problems[0].path == "model.chat_template"


def test_a_missing_one_is_found_without_a_start(tmp_path: Path) -> None:
    resolved = configured(tmp_path, tmp_path / "own.jinja")
    with pytest.raises(ConfigError, match=r"model\.chat_template: .*own\.jinja cannot be read"):
        check_model(resolved, Selection(resolved))
