"""Contract: where a model comes from."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pegboard.core.interfaces.options import Component, OptionsT

if TYPE_CHECKING:
    from pegboard.core.interfaces.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelSourceContext:
    """`reference` is `model.path` as the operator wrote it; `cache_dir` is where converted models are kept."""

    reference: str
    cache_dir: Path


class ModelSource(Component[OptionsT, ModelSourceContext]):
    """Turns a reference into a directory in Hugging Face's layout: config.json, safetensors, tokenizer.json."""

    def check(self) -> bool:
        """Look at what there is of the model on this machine; fetch and convert nothing. Return False where that says
        nothing, as of a model that is still to be fetched.

        Raises ModelError as `prepare` would.
        """
        return False

    @abc.abstractmethod
    def prepare(self) -> Path:
        """Return the directory; fetched or converted first where needed, once and atomically, safe with concurrent
        starters.

        Raises ModelError saying what is missing and what to do, and Temporary where another start may mend it.
        """

    @abc.abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer, without importing torch or transformers. Calls `prepare` if need be."""
