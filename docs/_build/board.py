"""Draws a board with plugins as pegs, the badges and the logo: ``python -m docs._build.board docs/images``.

A test compares the files with what this draws, and the pegs with the plugins that there are.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from docs._build.svg import MONO, THEMES, document, rect, text, write_themes

PEGS: Mapping[str, tuple[str, ...]] = {
    "apis": ("openai", "anthropic", "native", "metrics"),
    "gates": ("session", "prefetch", "disagg"),
    "scheduler.policy": ("fcfs", "priority", "srtf", "lpm"),
    "prefix_cache": ("radix", "block", "hiradix"),
    "memory.storage": ("files", "redis", "mooncake"),
    "kv_transfer": ("tcp", "nixl", "mooncake"),
    "tool_parser": ("hermes", "mistral", "llama3_json", "pythonic"),
    "model": ("dense", "transformers"),
    "runner": ("cpu_native", "layered"),
    "attention": ("torch", "triton", "flashinfer"),
    "sampler": ("torch", "cpu_native", "triton"),
    "grammar": ("llguidance", "xgrammar"),
    "speculation": ("ngram", "eagle"),
    "media.processor": ("qwen_vl",),
}
"""Providers by the key of the config that chooses among them: the upper half of the board, then the lower one."""
YOURS = {
    "scheduler.policy": "shortest_job",
    "sampler": "yours",
    "prefix_cache": "yours",
    "model": "yours",
    "gates": "yours",
}
"""Pegs of third parties; `shortest_job` is the plugin of README.md."""
STAGES = ("intake", "queue", "policy", "admission", "memory", "batch", "worker", "results", "outputs")
TITLE = (
    "A board: the core in the middle is the path of a request, from intake to outputs. Above and below it stand plugins "
    "as pegs, in a column for each key of the config, and pegs of third parties among them."
)

_COLUMN = 122
_LEFT = 21
_PEG = 25
_STEP = 32
_UPPER, _CORE, _LOWER = 24, 214, 318
_WIDTH, _HEIGHT = 2 * _LEFT + 7 * _COLUMN, 484


def board(colours: Mapping[str, str]) -> str:
    """Return the picture of the board."""
    return document(_WIDTH, _HEIGHT, TITLE, _board(colours))


def _board(colours: Mapping[str, str]) -> Iterator[str]:
    hole = f'<circle cx="10" cy="10" r="1.6" fill="{colours["hole"]}"/>'
    yield f'<defs><pattern id="holes" width="20" height="20" patternUnits="userSpaceOnUse">{hole}</pattern></defs>'
    yield rect(1, 1, _WIDTH - 2, _HEIGHT - 2, colours["board"], round_=14, extra=f'stroke="{colours["line"]}"')
    yield rect(1, 1, _WIDTH - 2, _HEIGHT - 2, "url(#holes)", round_=14)
    keys = list(PEGS)
    for half, top in ((keys[:7], _UPPER), (keys[7:], _LOWER)):
        for place, key in enumerate(half):
            yield from _column(colours, key, _LEFT + place * _COLUMN, top)
    yield from _core(colours)


def _column(colours: Mapping[str, str], key: str, x: float, top: float) -> Iterator[str]:
    yield text(x + 4, top + 12, key, colours["ink"], size=11, extra=f'font-family="{MONO}" font-weight="600"')
    y = top + 22
    for name in PEGS[key]:
        yield rect(x + 3, y, _COLUMN - 12, _PEG, colours["peg"], round_=_PEG / 2, extra=f'stroke="{colours["line"]}"')
        yield from _pin(x + 16, y + _PEG / 2, colours["accent"], name, colours["ink"])
        y += _STEP
    if name := YOURS.get(key, ""):
        dashed = f'stroke="{colours["accent"]}" stroke-width="1.5" stroke-dasharray="4 3"'
        yield rect(x + 3, y, _COLUMN - 12, _PEG, colours["board"], round_=_PEG / 2, extra=dashed)
        yield from _pin(x + 16, y + _PEG / 2, colours["second"], name, colours["ink"])


def _pin(x: float, y: float, fill: str, name: str, ink: str) -> Iterator[str]:
    yield f'<circle cx="{x:g}" cy="{y:g}" r="5" fill="{fill}"/>'
    yield text(x + 11, y + 4.2, name, ink, size=12.5)


def _core(colours: Mapping[str, str]) -> Iterator[str]:
    yield rect(_LEFT, _CORE, _WIDTH - 2 * _LEFT, 82, colours["core"], round_=10)
    yield text(_LEFT + 16, _CORE + 26, "core: the path of a request, and typed contracts", colours["core_ink"], size=14)
    right = _WIDTH - _LEFT - 16
    yield text(right, _CORE + 26, "entry points, one config, one suite per contract", colours["core_ink"], anchor="end")
    width = (_WIDTH - 2 * _LEFT - 32) / len(STAGES)
    for place, stage in enumerate(STAGES):
        x = _LEFT + 16 + place * width
        outline = f'fill-opacity="0.12" stroke="{colours["core_ink"]}" stroke-opacity="0.45"'
        yield rect(x, _CORE + 42, width - 14, 26, colours["core_ink"], round_=5, extra=outline)
        yield text(x + (width - 14) / 2, _CORE + 59, stage, colours["core_ink"], size=12.5, anchor="middle")
        if place < len(STAGES) - 1:
            arrow = f"M{x + width - 11:g} {_CORE + 51:g}l6 4l-6 4"
            yield f'<path d="{arrow}" fill="none" stroke="{colours["core_ink"]}" stroke-width="1.6"/>'


def badges(project: Mapping[str, object]) -> str:
    """Return the badges as one picture, which is right on any page; `project` is that table of pyproject.toml."""
    versions = sorted(
        one.rpartition(" ")[2]
        for one in _texts(project["classifiers"])
        if one.startswith("Programming Language :: Python")
    )
    shown = {
        "python": ", ".join(versions),
        "licence": str(project["license"]),
        "types": "mypy strict",
        "runs on": "CPU, CUDA",
    }
    parts: list[str] = []
    x = 0.0
    for left, right in shown.items():
        parts += _badge(x, left, right)
        x += _width(left) + _width(right) + 8
    return document(x - 8, 20, "; ".join(f"{left}: {right}" for left, right in shown.items()), parts)


def _texts(values: object) -> Iterator[str]:
    assert isinstance(values, list)
    yield from (str(one) for one in values)


def _width(words: str) -> float:
    return 6.4 * len(words) + 14


def _badge(x: float, left: str, right: str) -> Iterator[str]:
    first, second = _width(left), _width(right)
    yield rect(x, 0, first + second, 20, THEMES["light"]["accent"], round_=4)
    yield f'<path d="M{x + first:g} 0h{4 - first:g}a4 4 0 0 0 -4 4v12a4 4 0 0 0 4 4h{first - 4:g}z" fill="#3d4a52"/>'
    for start, width, words in ((x, first, left), (x + first, second, right)):
        spread = f'textLength="{width - 14:g}" lengthAdjust="spacingAndGlyphs"'
        yield text(start + width / 2, 14, words, "#ffffff", size=11.5, anchor="middle", extra=spread)


def logo() -> str:
    """Return the sign of the project: four pegs, one of which is a third party's."""
    light = THEMES["light"]
    pegs = ((18, 18, "#ffffff"), (46, 18, "#ffffff"), (18, 46, "#ffffff"), (46, 46, light["second"]))
    circles = (f'<circle cx="{x}" cy="{y}" r="9" fill="{fill}"/>' for x, y, fill in pegs)
    return document(64, 64, "Pegboard", [rect(0, 0, 64, 64, light["accent"], round_=12), *circles])


def main(arguments: list[str]) -> int:
    """Write all pictures into the folder that is named."""
    (folder,) = map(Path, arguments)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    write_themes(folder, "board", board)
    (folder / "badges.svg").write_text(badges(project), "utf-8")
    (folder / "logo.svg").write_text(logo(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
