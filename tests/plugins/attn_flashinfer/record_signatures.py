"""Record the signatures of FlashInfer's wrappers, read from its source: nothing of it is imported or run.

``pip download --no-deps flashinfer-python==0.7.2.post1``, unpack the wheel, and then
``python -m tests.plugins.attn_flashinfer.record_signatures DIRECTORY`` with the directory that holds `flashinfer/`.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path

SIGNATURES = Path(__file__).with_name("signatures.json")

Parameter = list[str | None]
"""Name, kind and default (as it is written; None for none)."""

METHODS = {
    "decode.py": (
        "BatchDecodeWithPagedKVCacheWrapper",
        ("__init__", "reset_workspace_buffer", "plan", "_plan_impl", "run"),
    ),
    "prefill.py": (
        "BatchPrefillWithPagedKVCacheWrapper",
        ("__init__", "reset_workspace_buffer", "plan", "prewarm_paged_kv_stride_variant", "run"),
    ),
}


def of_source(function: ast.FunctionDef) -> list[Parameter]:
    """Return the parameters of a function in a syntax tree."""
    arguments = function.args
    placed = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(placed) - len(arguments.defaults)) + [ast.unparse(one) for one in arguments.defaults]
    found: list[Parameter] = [
        [one.arg, "POSITIONAL_OR_KEYWORD", default] for one, default in zip(placed, defaults, strict=True)
    ]
    if arguments.vararg:
        found.append([arguments.vararg.arg, "VAR_POSITIONAL", None])
    for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append([one.arg, "KEYWORD_ONLY", None if value is None else ast.unparse(value)])
    if arguments.kwarg:
        found.append([arguments.kwarg.arg, "VAR_KEYWORD", None])
    return found


def of_function(function: Callable[..., object]) -> list[Parameter]:
    """Return the parameters of a function of ours."""
    return [
        [one.name, one.kind.name, None if one.default is one.empty else repr(one.default)]
        for one in inspect.signature(function).parameters.values()
    ]


def read(directory: Path) -> dict[str, list[Parameter]]:
    """Return all signatures of a wheel's sources."""
    found: dict[str, list[Parameter]] = {}
    for file, (name, methods) in METHODS.items():
        tree = ast.parse((directory / "flashinfer" / file).read_text())
        (wrapper,) = (one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name)
        # Overloads come before what they describe: the last one counts.
        functions = {one.name: one for one in wrapper.body if isinstance(one, ast.FunctionDef)}
        found |= {f"{name}.{method}": of_source(functions[method]) for method in methods}
    tree = ast.parse((directory / "flashinfer" / "cascade.py").read_text())
    merges = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}
    found["merge_state_in_place"] = of_source(merges["merge_state_in_place"])
    return found


def written(signatures: dict[str, list[Parameter]]) -> str:
    """Return them as JSON, a parameter a line."""
    parts = []
    for name, parameters in signatures.items():
        lines = ",\n".join(f"    {json.dumps(one)}" for one in parameters)
        parts.append(f"  {json.dumps(name)}: [\n{lines}\n  ]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    SIGNATURES.write_text(written(read(Path(sys.argv[1]))))
