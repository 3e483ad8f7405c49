"""`model.chat_template` of the config: a chat template that replaces the model's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import ConfigError, InvalidRequest, Problem

if TYPE_CHECKING:
    from pegboard.core.interfaces.tokenizer import Tokenizer


def with_own_template(tokenizer: Tokenizer, path: str | None) -> Tokenizer:
    """Return the tokenizer with the chat template of a file; as it is where the config names none. Raises ConfigError.

    Tokenizers offer that as `with_chat_template(source)`; those of other distributions need not.
    """
    if path is None:
        return tokenizer
    source = read_template(path)
    replace = getattr(tokenizer, "with_chat_template", None)
    if replace is None:
        raise _wrong(f"the model's tokenizer, {type(tokenizer).__name__}, takes no other template")
    try:
        changed: Tokenizer = replace(source)
    except InvalidRequest as error:
        raise _wrong(f"{path}: {error.message}") from None
    return changed


def read_template(path: str) -> str:
    """Return the text of a template's file. Raises ConfigError for one that cannot be read, or is empty."""
    try:
        text = Path(path).expanduser().read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _wrong(f"{path} is not UTF-8: {error}") from None
    except OSError as error:
        raise _wrong(f"{path} cannot be read: {error.strerror}; name a file with a Jinja template") from None
    if not text.strip():
        raise _wrong(f"{path} is empty")
    return text


def _wrong(message: str) -> ConfigError:
    return ConfigError(Problem("model.chat_template", message))
