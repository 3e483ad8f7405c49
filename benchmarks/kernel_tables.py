"""The page docs/gpu-kernels.md: what `benchmarks.compile_kernels` found, a table per kernel and a row per case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.compile_kernels import Built
    from benchmarks.kernels import Target

PAGE = """# Registers and shared memory of GPU kernels

Written by `{command}` on {date}, with Triton {version}: {count} kernels. Cases are in `benchmarks/kernels`.

A cell has the registers of a thread, the KiB of shared memory of a block, and the share of a multiprocessor's warps
that are resident at once; then, for products of matrices on tensor cores, the instruction. A case compiles some kernels
several times, for tiles of several sizes, with draft trees and without, whole and in parts: these give a range.

Cases of attention are sizes of heads, types of q and, if it is another one, of KV. "flags" are a window, a soft cap and
sinks. {spilled}
"""

COLUMNS = "| case | {targets} |\n|---|{rules}|"


def page(found: Sequence[Built], command: str, version: str) -> str:
    """Return the page in Markdown. `command` wrote it, with Triton's `version`."""
    spills = [one for one in found if one.spilled]
    spilled = "None spills." if not spills else f"{len(spills)} of them spill, which cells say."
    date = datetime.now(UTC).date().isoformat()
    parts = [PAGE.format(command=command, date=date, version=version, count=len(found), spilled=spilled)]
    for kernel in dict.fromkeys(one.kernel for one in found):
        parts.append(f"## {kernel}\n\n{table([one for one in found if one.kernel == kernel])}\n")
    return "\n".join(parts)


def table(found: Sequence[Built]) -> str:
    """Return a table of one kernel: a row for all cases that take the same."""
    targets = sorted({one.target for one in found}, key=lambda target: target.capability)
    rows: dict[tuple[str, ...], list[str]] = {}
    for case in dict.fromkeys(one.case for one in found):
        cells = tuple(cell(found, case, target) for target in targets)
        rows.setdefault(cells, []).append(case.removeprefix("attention "))
    names = " | ".join("sm_{}{}".format(*target.capability) for target in targets)
    lines = [f"| {'; '.join(cases)} | {' | '.join(cells)} |" for cells, cases in rows.items()]
    return "\n".join((COLUMNS.format(targets=names, rules="|".join("---" for _ in targets)), *lines))


def cell(found: Sequence[Built], case: str, target: Target) -> str:
    """Return what a case takes on a target; nothing where it compiles to what another case does."""
    some = [one for one in found if (one.case, one.target) == (case, target)]
    if not some:
        return "the same as another"

    def span(of: Callable[[Built], float]) -> str:
        numbers = sorted(round(of(one)) for one in some)
        return str(numbers[0]) if numbers[0] == numbers[-1] else f"{numbers[0]} to {numbers[-1]}"

    parts = [span(lambda one: one.registers), f"{span(lambda one: one.shared / 1024)} KiB"]
    parts.append(f"{span(lambda one: 100 * one.occupancy)}%")
    parts += sorted({one.products for one in some if one.products})
    spilled = sum(one.spilled for one in some)
    return ", ".join((*parts, f"spills {spilled} bytes") if spilled else parts)
