"""Install other authors' clients, the newest that go together, apart from the project: ``make clients``.

Their requirements conflict with ours and with each other's, so each group has an environment of its own.
"""

from __future__ import annotations

import re
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
    "instructor": ("instructor",),
    "ollama": ("ollama",),
    "lm-eval": ("lm-eval[api]",),
    "sglang-router": ("sglang-router",),
}
"""The clients of each group."""

NODE: dict[str, tuple[str, ...]] = {"ai-sdk": ("ai@6", "@ai-sdk/openai@3")}
"""The newest for Node 20; the AI SDK's next major version needs Node 22."""

BESIDES: dict[str, tuple[str, ...]] = {
    "litellm": ("mcp",),  # imported for every request with tools, though not required
    "instructor": ("anthropic",),
    "lm-eval": ("transformers",),
    "ai-sdk": ("zod@4",),
}
"""What a group's clients need and do not bring."""


def python_of(group: str) -> Path:
    """The interpreter of a group's environment."""
    return HOME / group / "bin" / "python"


def modules_of(group: str) -> Path:
    """Where the packages of one of Node's groups lie."""
    return HOME / group / "node_modules"


def names(packages: tuple[str, ...]) -> list[str]:
    """Packages without extras and versions."""
    return [re.sub(r"\[.*|(?<=.)@.*", "", one) for one in packages]


def install_python(group: str, clients: tuple[str, ...]) -> list[str]:
    """Make or renew an environment. Returns its clients with their versions."""
    uv, python = str(Path(sys.executable).parent / "uv"), str(python_of(group))
    if not python_of(group).exists():
        subprocess.run([uv, "venv", "-q", "--python", sys.executable, str(HOME / group)], check=True)
    options = ["-q", "--system-certs", "--upgrade", "--python", python]
    subprocess.run([uv, "pip", "install", *options, *clients, *BESIDES.get(group, ())], check=True)
    code = "import sys; from importlib.metadata import version as v; print(*(f'{a}=={v(a)}' for a in sys.argv[1:]))"
    return subprocess.check_output([python, "-c", code, *names(clients)], text=True).split()


def install_node(group: str, clients: tuple[str, ...]) -> list[str]:
    """The same for Node."""
    (HOME / group).mkdir(parents=True, exist_ok=True)
    quiet = ["--no-audit", "--no-fund", "--silent", "--prefix", str(HOME / group)]
    subprocess.run(["npm", "install", *quiet, *clients, *BESIDES[group]], check=True)
    code = "for (const a of process.argv.slice(1)) console.log(`${a}@${require(`./${a}/package.json`).version}`)"
    return subprocess.check_output(["node", "-e", code, *names(clients)], text=True, cwd=modules_of(group)).split()


def main() -> int:
    """Install all groups. Returns how many could not be installed."""
    failed = 0
    for group, clients in (PYTHON | NODE).items():
        if group in NODE and shutil.which("npm") is None:
            print(f"{group}: left out, for there is no npm")  # noqa: T201
            continue
        try:
            found = (install_node if group in NODE else install_python)(group, clients)
        except (OSError, subprocess.CalledProcessError) as error:
            failed += 1
            found = ["failed:", str(error)]
        print(f"{group}:", *found, flush=True)  # noqa: T201
    return failed


if __name__ == "__main__":
    sys.exit(main())
