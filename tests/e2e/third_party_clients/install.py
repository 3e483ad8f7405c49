"""Install other authors' clients, the newest that go together, apart from the project: ``make clients``.

Their requirements conflict with ours and with each other's, so each group has an environment of its own.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
HOME = ROOT / ".clients"

PYTHON: dict[str, tuple[str, ...]] = {
    "sdks": ("openai", "anthropic"),
    "openai-agents": ("openai-agents",),
    "litellm": ("litellm",),
    "langchain": ("langchain-openai", "langchain-anthropic"),
    "instructor": ("instructor", "anthropic"),
    "lm-eval": ("lm-eval[api]", "transformers"),
}
"""By group, what pip would be asked for; the first ones are the clients, others what a client needs besides."""

NODE: dict[str, tuple[str, ...]] = {"ai-sdk": ("ai", "@ai-sdk/openai", "zod")}


def python_of(group: str) -> Path:
    """The interpreter of a group's environment."""
    return HOME / group / "bin" / "python"


def modules_of(group: str) -> Path:
    """Where the packages of one of Node's groups lie."""
    return HOME / group / "node_modules"


def names(packages: tuple[str, ...]) -> list[str]:
    """Packages without their extras."""
    return [one.partition("[")[0] for one in packages]


def install_python(group: str, packages: tuple[str, ...]) -> list[str]:
    """Make or renew an environment. Returns its clients with their versions."""
    uv, python = str(Path(sys.executable).parent / "uv"), str(python_of(group))
    if not python_of(group).exists():
        subprocess.run([uv, "venv", "-q", "--python", sys.executable, str(HOME / group)], check=True)
    options = ["-q", "--system-certs", "--upgrade", "--python", python]
    subprocess.run([uv, "pip", "install", *options, *packages], check=True)
    code = "import sys; from importlib.metadata import version as v; print(*(f'{a}=={v(a)}' for a in sys.argv[1:]))"
    return subprocess.check_output([python, "-c", code, *names(packages)], text=True).split()


def install_node(group: str, packages: tuple[str, ...]) -> list[str]:
    """The same for Node."""
    (HOME / group).mkdir(parents=True, exist_ok=True)
    quiet = ["--no-audit", "--no-fund", "--silent", "--prefix", str(HOME / group)]
    subprocess.run(["npm", "install", *quiet, *(f"{one}@latest" for one in packages)], check=True)
    code = "for (const a of process.argv.slice(1)) console.log(`${a}@${require(`./${a}/package.json`).version}`)"
    return subprocess.check_output(["node", "-e", code, *packages], text=True, cwd=modules_of(group)).split()


def main() -> int:
    """Install all groups. Returns how many could not be installed."""
    failed = 0
    for group, packages in (PYTHON | NODE).items():
        if group in NODE and shutil.which("npm") is None:
            print(f"{group}: left out, for there is no npm")  # noqa: T201
            continue
        try:
            found = (install_node if group in NODE else install_python)(group, packages)
        except (OSError, subprocess.CalledProcessError) as error:
            failed += 1
            found = ["failed:", str(error)]
        print(f"{group}:", *found, flush=True)  # noqa: T201
    return failed


if __name__ == "__main__":
    sys.exit(main())
