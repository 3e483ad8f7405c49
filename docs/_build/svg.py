"""Shapes and colours of the pictures in docs/images that a command draws: plain SVG, in a light and a dark version.

A page shows the version of its reader's theme: README.md by `<picture>`, the site by `#only-light` and `#only-dark`.
Texts use fonts that every system has, so a picture fetches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from html import escape
from pathlib import Path

SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
THEMES: Mapping[str, Mapping[str, str]] = {
    "light": {
        "page": "#ffffff",
        "board": "#f4efe4",
        "hole": "#ddd3bf",
        "line": "#cfc4ae",
        "ink": "#1f2a30",
        "muted": "#5d6a72",
        "core": "#12343b",
        "core_ink": "#ffffff",
        "peg": "#ffffff",
        "accent": "#0b7d73",
        "second": "#63bdb2",
        "other": "#c3ccd2",
        "other_best": "#8795a0",
    },
    "dark": {
        "page": "#0d1117",
        "board": "#1b222b",
        "hole": "#2c3641",
        "line": "#3a4653",
        "ink": "#e6edf3",
        "muted": "#9aa7b2",
        "core": "#0f4a4a",
        "core_ink": "#eafffb",
        "peg": "#27313c",
        "accent": "#2fb3a4",
        "second": "#8fe0d4",
        "other": "#56636f",
        "other_best": "#8494a2",
    },
}
"""Colours by their part. Texts reach a contrast of 4.5 on what is under them."""


def rect(x: float, y: float, width: float, height: float, fill: str, *, round_: float = 0, extra: str = "") -> str:
    """Return a rectangle; `extra` is further attributes."""
    corner = f' rx="{round_:g}"' if round_ else ""
    more = f" {extra}" if extra else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{corner} fill="{fill}"{more}/>'


def text(x: float, y: float, words: str, fill: str, *, size: float = 13, anchor: str = "start", extra: str = "") -> str:
    """Return a line of text whose baseline is at `y`; `extra` is further attributes."""
    more = f" {extra}" if extra else ""
    place = f'x="{x:g}" y="{y:g}" fill="{fill}" font-size="{size:g}" text-anchor="{anchor}"{more}'
    return f"<text {place}>{escape(words)}</text>"


def document(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """Return a whole picture. `title` is what a reader hears who does not see it."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" font-family="{SANS}">'
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>", ""])


def write_themes(folder: Path, name: str, draw: Callable[[Mapping[str, str]], str]) -> None:
    """Write `name`-light.svg and `name`-dark.svg into `folder`."""
    for theme, colours in THEMES.items():
        (folder / f"{name}-{theme}.svg").write_text(draw(colours), "utf-8")
