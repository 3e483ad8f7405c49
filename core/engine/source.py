"""Finding the model: from a reference to a directory and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pegboard.core.interfaces.contracts import MODEL_SOURCE
from pegboard.core.interfaces.errors import ConfigError, Problem
from pegboard.core.interfaces.model_source import ModelSource, ModelSourceContext
from pegboard.toolkit.chat.own_template import read_template, with_own_template
from pegboard.toolkit.text.plain_trees import FILE_SUFFIXES

if TYPE_CHECKING:
    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.config.select import Selection
    from pegboard.core.interfaces.options import Options
    from pegboard.core.interfaces.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A local model directory and its tokenizer."""

    directory: Path
    tokenizer: Tokenizer


def prepare_model(resolved: ResolvedConfig, selection: Selection) -> PreparedModel:
    """Ask the sources in rank order; convert or fetch where that has not happened. Raises ModelError or ConfigError."""
    source = _source(resolved, selection)
    return PreparedModel(source.prepare(), with_own_template(source.tokenizer(), resolved.engine.model.chat_template))


def check_model(resolved: ResolvedConfig, selection: Selection) -> bool:
    """Raise what `prepare_model` would, without fetching or converting; False where that tells nothing."""
    if (template := resolved.engine.model.chat_template) is not None:
        read_template(template)
    return _source(resolved, selection).check()


def _source(resolved: ResolvedConfig, selection: Selection) -> ModelSource[Options]:
    from pegboard.toolkit.system.cache_dir import cache_path, default_cache_dir

    model = resolved.engine.model
    context = ModelSourceContext(
        reference=model.path, cache_dir=cache_path(model.cache_dir) if model.cache_dir else default_cache_dir()
    )
    try:
        choice = selection.choose(MODEL_SOURCE, context)
    except ConfigError as error:
        # A source takes a path or does not: it is the path that is wrong.
        file = Path(model.path).expanduser().is_file()
        hint = f"; a config file would end in {', '.join(FILE_SUFFIXES)}" if file else ""
        message = error.problems[0].message
        if MODEL_SOURCE.name not in resolved.named:
            message = f"no model source takes {model.path!r}: {message.partition(': ')[2]}"
        raise ConfigError(Problem("model.path", f"{message}{hint}", resolved.origins.get("model.path", ""))) from error
    return choice.build(context)
