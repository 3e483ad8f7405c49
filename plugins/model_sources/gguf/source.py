"""GGUF files."""

from __future__ import annotations

from pathlib import Path

from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.model_source import ModelSourceContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.model_sources.base import DirectorySource
from pegboard.plugins.model_sources.gguf.parts import part_files

_MAGIC = b"GGUF"


class GGUFSource(DirectorySource[NoOptions]):
    """`model.path` names a .gguf file; it is converted once into the cache folder."""

    @classmethod
    def supports(cls, options: NoOptions, ctx: ModelSourceContext) -> str | None:
        """Return None for a reference that ends in .gguf, whether the file exists or not."""
        return None if ctx.reference.lower().endswith(".gguf") else f"{ctx.reference!r} does not end in .gguf"

    def check(self) -> bool:
        for file in part_files(self._file()):
            with file.open("rb") as stream:
                if stream.read(len(_MAGIC)) != _MAGIC:
                    raise ModelError(f"model.path: {file} is not a GGUF file: it does not begin with {_MAGIC!r}")
        return True

    def locate(self) -> Path:
        from pegboard.plugins.model_sources.gguf.convert import convert_gguf

        return convert_gguf(self._file(), self.ctx.cache_dir, codes=True)

    def _file(self) -> Path:
        file = Path(self.ctx.reference).expanduser()
        if not file.is_file():
            raise ModelError(f"model.path: no such GGUF file: {file}")
        return file
