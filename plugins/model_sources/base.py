"""What the three sources share: a directory prepared once, and the tokenizer read from it."""

from __future__ import annotations

import abc
from pathlib import Path

from pegboard.core.interfaces.model_source import ModelSource, ModelSourceContext
from pegboard.core.interfaces.options import OptionsT
from pegboard.core.interfaces.tokenizer import Tokenizer


class DirectorySource(ModelSource[OptionsT]):
    """A source whose `locate` finds or makes the directory; the result is kept."""

    def __init__(self, options: OptionsT, ctx: ModelSourceContext) -> None:
        super().__init__(options, ctx)
        self._directory: Path | None = None
        self._tokenizer: Tokenizer | None = None

    @abc.abstractmethod
    def locate(self) -> Path:
        """Return the directory, converted or fetched where needed. Raises ModelError."""

    def prepare(self) -> Path:
        if self._directory is None:
            self._directory = self.locate()
        return self._directory

    def tokenizer(self) -> Tokenizer:
        from pegboard.toolkit.text.tokenizer import Tokenizer as FileTokenizer

        if self._tokenizer is None:
            self._tokenizer = FileTokenizer.from_directory(self.prepare())
        return self._tokenizer
