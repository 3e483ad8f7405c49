"""What the commands print with."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any


def write(text: str = "") -> None:
    sys.stdout.write(f"{text}\n")


def write_json(value: Any) -> None:
    write(json.dumps(value, indent=2, ensure_ascii=False))


def write_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns on a terminal in its width; in a pipe as wide as they are, for grep and awk."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(*head, box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 1000
    with console.capture() as captured:
        console.print(table)
    write("\n".join(line.rstrip() for line in captured.get().rstrip().splitlines()))
