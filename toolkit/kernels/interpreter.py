"""Whether kernels are compiled for a GPU or interpreted on the CPU."""

from __future__ import annotations

import os
import sys

VARIABLE = "TRITON_INTERPRET"


def interpreting() -> bool:
    """Return whether the environment asks for Triton's interpreter."""
    return os.environ.get(VARIABLE, "").strip().lower() in ("1", "true", "on", "yes", "y")


def objection() -> str | None:
    """Return why the interpreter cannot be used in this process; None if it can, or has been turned on in time.

    Triton decides for good when it is imported: its own functions become compiled or interpreted ones.
    """
    if not interpreting():
        return f"{VARIABLE} is not set"
    triton = sys.modules.get("triton")
    if triton is not None and isinstance(sys.modules["triton.language"].sum, triton.runtime.JITFunction):
        return f"triton was imported before {VARIABLE}=1 was set: set it in the environment that starts the process"
    return None
