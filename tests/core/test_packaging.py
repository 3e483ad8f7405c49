"""What is shipped: a built wheel against the tree, records against entry points."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from pegboard.core.registry import Registry
from pegboard.core.version import __version__

ROOT = Path(__file__).parents[2]
FOLDERS = ("core", "plugins")


def project() -> dict[str, object]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        found = tomllib.load(file)["project"]
    assert isinstance(found, dict)
    return found


def tree() -> set[str]:
    """Every file of the two roots as the wheel should name it."""
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {f"pegboard/{name}" for name in tracked.stdout.splitlines() if (ROOT / name).is_file()}


def test_every_folder_with_code_is_a_package() -> None:
    bare = {
        str(path.parent.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    }
    assert bare == set()


def test_every_plugin_folder_has_its_entry_point() -> None:
    folders = {path.parent.name for path in (ROOT / "plugins").glob("*/__init__.py")}
    points = {
        point.name: point.value
        for point in entry_points(group="pegboard")
        if point.dist and point.dist.name == "pegboard"
    }
    assert set(points) == folders
    assert all(value == f"pegboard.plugins.{name}:plugin" for name, value in points.items())


def test_factories_stand_in_their_own_plugin() -> None:
    for one in Registry.discover().plugins:
        if one.origin.builtin:
            own = f"pegboard.plugins.{one.plugin.name}."
            names = [name for each in one.plugin.providers for name in (each.factory, each.config) if name]
            assert all(name.startswith(own) for name in (*names, *one.plugin.hooks)), one.plugin.name


def test_the_version_is_the_same_everywhere() -> None:
    assert project()["version"] == __version__
    versions = {one.plugin.name: one.plugin.version for one in Registry.discover().plugins if one.origin.builtin}
    assert set(versions.values()) == {__version__}


def test_constraints_pin_torch_to_what_the_two_commands_promise() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert pins["torch"] == "2.13.0"
    assert "triton" not in pins


@pytest.mark.full
def test_a_wheel_ships_the_tree_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("LICENSE")]
    assert names == tree()
    assert licences
