"""The page of kernels: what a case takes on each target, and cases that take the same in one row."""

from __future__ import annotations

from benchmarks.compile_kernels import Built
from benchmarks.kernel_tables import page, table
from benchmarks.kernels import Target


def built(case: str, registers: int, *, kernel: str = "a_kernel", minor: int = 0, **others: int) -> Built:
    spilled, shared = others.get("spilled", 0), others.get("shared", 0)
    return Built(case, kernel, Target((8, minor)), 4, registers, spilled, shared, 0.25, "mma.sync", "")


def test_a_row_for_cases_that_take_the_same() -> None:
    found = [built("attention one", 40), built("attention two", 40), built("three", 41)]
    assert table(found).splitlines() == [
        "| case | sm_80 |",
        "|---|---|",
        "| one; two | 40, 0 KiB, 25%, mma.sync |",
        "| three | 41, 0 KiB, 25%, mma.sync |",
    ]


def test_several_kernels_of_a_case_and_several_targets() -> None:
    found = [built("one", 40, minor=6), built("one", 90, shared=2048), built("one", 32, spilled=8), built("two", 9)]
    assert table(found).splitlines()[::2] == [
        "| case | sm_80 | sm_86 |",
        "| one | 32 to 90, 0 to 2 KiB, 25%, mma.sync, spills 8 bytes | 40, 0 KiB, 25%, mma.sync |",
    ]
    assert "| two | 9, 0 KiB, 25%, mma.sync | the same as another |" in table(found)


def test_the_page() -> None:
    found = [built("one", 40), built("one", 50, kernel="b_kernel")]
    text = page(found, "python -m benchmarks.compile_kernels --markdown FILE", "3.9.0")
    assert text.startswith(
        "# Registers and shared memory of GPU kernels\n\n"
        "Written by `python -m benchmarks.compile_kernels --markdown FILE` on 20"
    )
    assert "with Triton 3.9.0: 2 kernels." in text
    assert "None spills." in text
    assert text.index("## a_kernel") < text.index("| one | 40") < text.index("## b_kernel") < text.index("| one | 50")
    assert "1 of them spill" in page([built("one", 255, spilled=4)], "", "")
