"""Finding the model: from a reference to a directory and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pegboard.core.engine.own_template import with_own_template
from pegboard.core.interfaces.contracts import MODEL_SOURCE
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
    source = selection.choose(MODEL_SOURCE, context).build(context)
    return PreparedModel(source.prepare(), with_own_template(source.tokenizer(), model.chat_template))
