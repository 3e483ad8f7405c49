"""Finding the model: from a reference to a directory and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pegboard.core.interfaces.contracts import MODEL_SOURCE
from pegboard.core.interfaces.errors import ConfigError, InvalidRequest, Problem
from pegboard.core.interfaces.model_source import ModelSourceContext

if TYPE_CHECKING:
    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.config.select import Selection
    from pegboard.core.interfaces.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A local model directory and its tokenizer."""

    directory: Path
    tokenizer: Tokenizer


def prepare_model(resolved: ResolvedConfig, selection: Selection) -> PreparedModel:
    """Ask the sources in rank order; convert or fetch where that has not happened. Raises ModelError or ConfigError."""
    from pegboard.core.toolkit.system.cache_dir import cache_path, default_cache_dir

    model = resolved.engine.model
    context = ModelSourceContext(
        reference=model.path, cache_dir=cache_path(model.cache_dir) if model.cache_dir else default_cache_dir()
    )
    choice = selection.choose(MODEL_SOURCE, context)
    source = choice.build(context)
    directory, tokenizer = source.prepare(), source.tokenizer()
    if model.chat_template is not None:
        tokenizer = _with_template(tokenizer, model.chat_template, choice.name)
    return PreparedModel(directory, tokenizer)


def _with_template(tokenizer: Tokenizer, path: str, source: str) -> Tokenizer:
    """Return the tokenizer with the chat template of a file. Raises ConfigError, with what is wrong with that."""
    replace = getattr(tokenizer, "with_chat_template", None)
    problem = ""
    try:
        text = Path(path).expanduser().read_text("utf-8-sig")
        if replace is None:
            problem = f"the tokenizer of the model source {source!r} has no with_chat_template, and takes no other one"
        elif not text.strip():
            problem = f"{path} is empty"
        else:
            changed: Tokenizer = replace(text)
            return changed
    except UnicodeDecodeError as error:
        problem = f"{path} is not UTF-8: {error}"
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror}; name a file with a Jinja template"
    except InvalidRequest as error:
        problem = f"{path}: {error.message}"
    raise ConfigError(Problem("model.chat_template", problem))
