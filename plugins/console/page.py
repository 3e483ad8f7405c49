"""The page: one document, made of the files in `page/`."""

from __future__ import annotations

import functools
from importlib import resources
from typing import TYPE_CHECKING

from pegboard.toolkit.http.pages import html_page

if TYPE_CHECKING:
    from fastapi import Response

SCRIPTS = ("base", "key", "markdown", "chat", "charts", "live", "cache", "steps", "about", "start")
"""The parts of its script, in their order. They are one script, and share their names."""


@functools.cache
def page() -> Response:
    """Return the answer that has it."""
    return html_page(document(), images=True)


def document() -> str:
    """Return the text of the page."""
    files = resources.files("pegboard.plugins.console") / "page"

    def text(name: str) -> str:
        return (files / name).read_text("utf-8")

    script = "".join(text(f"{name}.js") for name in SCRIPTS)
    html = text("console.html").replace("/* style */", text("console.css"))
    return html.replace("/* script */", f'"use strict";\n{script}')
