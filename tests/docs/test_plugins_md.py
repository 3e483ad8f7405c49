"""docs/plugins.md works as it says: every block is written, run and compared, in order, in one folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint

PAGE = Path(__file__).parents[2] / "docs" / "plugins.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROMPT = "$ "
SUFFIXES = (".py", ".toml", ".yaml")

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    text: str

    @property
    def file(self) -> str:
        """The file that the block is, by the comment in its first line; "" for one that is run."""
        first = self.text.partition("\n")[0].removeprefix("# ")
        return first if first.endswith(SUFFIXES) and " " not in first else ""


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(text.count("\n", 0, one.start()) + 1, one[1], one[2]) for one in FENCE.finditer(text)]


class Reader:
    """Somebody who does what the page says, in `folder`, with a tiny model in place of the demo model."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.printed: dict[str, str] = {}
        """What each block of Python that is not a file printed."""
        self.logged: dict[str, str] = {}
        """What it wrote to the standard error."""
        self.site = folder / ".site"
        scripts = Path(sys.executable).parent
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PEGBOARD"))},
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
            # An editable install: the sources in front of what pip installed, which has the entry point.
            "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{self.site}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PEGBOARD__MODEL__PATH": str(model),
            "OMP_NUM_THREADS": "1",
        }

    def follow(self, block: Block) -> None:
        if block.file:
            path = self.folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.language == "python":
            done = self.run([sys.executable, "-c", block.text])
            assert done.returncode == 0, done.stdout + done.stderr
            self.printed[block.text] = done.stdout
            self.logged[block.text] = done.stderr
        elif block.language == "console":
            self.type(block.text)
        else:
            raise AssertionError(f"no test runs a {block.language} block that is not a file")

    def type(self, session: str) -> None:
        for command, expected in commands(session):
            if command == "pip install -e .":
                pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
                command = " ".join([*pip, "--target", str(self.site), "."])
            done = self.run(["bash", "-c", command])
            output = done.stdout + done.stderr
            if done.returncode:
                output += f"\n[exit code {done.returncode}]"
            compare(command, expected, output)

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=self.folder, env=self.env, capture_output=True, text=True, check=False)


def commands(session: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of a console block with the output that the page shows."""
    for part in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]:
        command, *expected = part.rstrip("\n").split("\n")
        yield command, expected


def compare(command: str, expected: list[str], output: str) -> None:
    """Fail unless the lines appear as shown; `...` stands for anything, and runs of spaces count as one."""
    shown = "".join(f"{' '.join(line.split())}\n" for line in output.splitlines() if line.strip())
    pattern = "".join("(?:.*\\n)*?" if line == "..." else _line(line) for line in expected)
    assert re.fullmatch(pattern, shown), f"$ {command}\n{output}\n--- the page shows:\n" + "\n".join(expected)


def _line(shown: str) -> str:
    return re.escape(" ".join(shown.split())).replace(r"\.\.\.", ".*") + r"\n"


@pytest.mark.full
def test_every_block(tmp_path: Path) -> None:
    """One test, because each block builds on those before it; and the hook is seen, as the page claims last."""
    model = tiny_checkpoint(tmp_path / "model", "llama", num_hidden_layers=1)
    folder = tmp_path / "shortest-job"
    folder.mkdir()
    reader = Reader(folder, model)
    for block in blocks(PAGE):
        try:
            reader.follow(block)
        except AssertionError as error:
            raise AssertionError(f"{PAGE.name}, line {block.line}: {error}") from None
    last = [block.text for block in blocks(PAGE) if block.language == "python" and not block.file][-1]
    assert reader.logged[last].count("8 tokens in 8 steps") == 2, reader.logged[last]
    assert reader.printed[last] == "[8, 8]\n"


def test_twenty_lines() -> None:
    """Code lines of the record and the class, as the page promises."""
    first = {block.file: block for block in reversed(blocks(PAGE)) if block.language == "python"}
    lines = [
        line
        for name in ("src/shortest_job/policy.py", "src/shortest_job/__init__.py")
        for line in first[name].text.splitlines()[1:]
        if line.strip()
    ]
    assert len(lines) <= 20


def test_the_class_of_four_lines_is_the_first() -> None:
    assert [block.file for block in blocks(PAGE)][:3] == [
        "src/shortest_job/policy.py",
        "src/shortest_job/__init__.py",
        "pyproject.toml",
    ]
