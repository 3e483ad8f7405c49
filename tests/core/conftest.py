"""Installed distributions made up for a test: real entry points, without pip."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

RECORD = """
from pegboard.core.interfaces.plugin import BodyField, Plugin, Provider, Requirement

plugin = Plugin(name={plugin!r}, version="1.0", api={api!r}, providers=({providers}))
"""


class Site:
    """A folder on sys.path with distributions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: set[str] = set()

    def install(self, distribution: str, version: str = "1.0", **plugins: str) -> None:
        """A distribution with one entry point per plugin, each naming a module with this source."""
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = ["[pegboard]"]
        for name, source in plugins.items():
            module = f"{distribution.replace('-', '_')}_{name}"
            self.modules.add(module)
            (self.folder / f"{module}.py").write_text(source)
            lines.append(f"{name} = {module}:plugin")
        (info / "entry_points.txt").write_text("\n".join(lines))

    @staticmethod
    def provider(contract: str, name: str, factory: str = "nowhere:Nothing", **fields: str) -> str:
        """Source of a Provider; `fields` are further arguments, as source."""
        more = "".join(f", {key}={value}" for key, value in fields.items())
        return f"Provider({contract!r}, {name!r}, {factory!r}, 'for a test'{more}),"

    @staticmethod
    def plugin(name: str, *providers: str, api: str = "1.0") -> str:
        """Source of a module with a plugin record."""
        return RECORD.format(plugin=name, api=api, providers=" ".join(providers))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    made = Site(folder)
    yield made
    for module in made.modules:
        sys.modules.pop(module, None)
