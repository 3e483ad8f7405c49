"""Options of the runner."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pegboard.core.interfaces.options import Options


class CpuNativeOptions(Options):
    """How the native code is built and run."""

    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of computing threads, of each rank. 0: one per core that this process may use, or that its container's
    quota allows; on several ranks, a rank's share of the cores."""
    instructions: Literal["auto", "amx", "avx512", "avx2", "amx_emulated"] = "auto"
    """Instruction set to compile for. `auto`: the best that this CPU has. `amx_emulated` is for tests: it runs the code
    for AMX on a CPU with AVX-512 only, very slowly."""
    weights: Literal["bf16", "bf12", "plain", "int8"] = "bf16"
    """How weights are kept. `bf16`: exactly, in as few bits as they take. Codes of 4 or 8 bits of quantised weights
    take 5 or 8.5 each. Where the CPU has AVX-512, so do others that lie on a grid, as those of a GGUF file do that was
    quantised to 4 or 8 bits, and the rest takes 12. `bf12`: exactly, without codes and without looking for grids.
    `plain`: in 16 bits. `int8`: in 8.5 at most, which changes answers a little where they do not lie on a grid anyway,
    and is faster than 12.
    """


class CpuNativeSamplerOptions(Options):
    """How the sampler's native code is built and run."""

    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of threads that sample the rows of a batch. 0: one per core that this process may use, or that its
    container's quota allows."""
    instructions: Literal["auto", "amx", "avx512", "avx2", "amx_emulated"] = "auto"
    """Instruction set to compile for. `auto`: the best that this CPU has. `amx_emulated` is for tests. All draw the
    same tokens."""
