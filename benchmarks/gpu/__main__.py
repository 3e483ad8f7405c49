"""Measures what a GPU does with Pegboard, in at most 8 minutes.

    python -m benchmarks.gpu [--json FILE] [--only SECTION ...] [--dry-run]

Sections run one after the other, each in a process and with a time limit of its own: one that fails, hangs, or lacks
something says so, and the others go on. Figures are medians, or means over many steps in a row; the card and all
versions stand beside them. `--dry-run` needs no GPU: every section runs over stand-ins with tiny shapes, and what it
prints is which figures would be measured. Goals are goals: nothing fails for missing them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import Bench, Skipped
from benchmarks.gpu.sections import SECTIONS


def run_here(name: str, dry: bool) -> dict[str, Any]:
    """Run a section in this process."""
    import torch

    section, _, _ = SECTIONS[name]
    bench = Bench(dry)
    if dry:
        torch.set_num_threads(1)
    try:
        if not dry and not torch.cuda.is_available():
            raise Skipped(f"torch {torch.__version__} finds no GPU here; --dry-run needs none")
        with torch.inference_mode():
            return {"rows": section(bench)}
    except Skipped as reason:
        return {"skipped": str(reason)}


def run_apart(name: str, dry: bool) -> dict[str, Any]:
    """Run a section in a process of its own, for as long as it may take."""
    _, limit, _ = SECTIONS[name]
    words = [sys.executable, "-m", "benchmarks.gpu", "--section", name, *(["--dry-run"] if dry else [])]
    start = time.perf_counter()
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"it took more than {limit:g} s", "seconds": limit}
    took = {"seconds": round(time.perf_counter() - start, 1)}
    if done.returncode:
        return {"failed": "\n".join(done.stderr.splitlines()[-12:]) or f"exit status {done.returncode}", **took}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, **took}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows for a terminal."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([_cell(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(names))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the sections, print what they found, and write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write everything here, too")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--section", choices=list(SECTIONS), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.section:
        print(json.dumps(run_here(given.section, given.dry_run)))
        return
    found: dict[str, Any] = {}
    for name in given.only:
        print(f"\n{name}: {SECTIONS[name][2]}", flush=True)
        found[name] = one = run_apart(name, given.dry_run)
        print(table(one["rows"]) if "rows" in one else f"{next(iter(one))}: {next(iter(one.values()))}", flush=True)
    if given.json:
        given.json.write_text(json.dumps({"dry_run": given.dry_run, "sections": found}, indent=1) + "\n")
    if any("failed" in one for one in found.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
