"""Options of FlashInfer's kernels."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pegboard.core.interfaces.options import Options


class FlashInferOptions(Options):
    """Which kernels, and what memory they work in."""

    backend: Literal["fa2", "fa3", "auto"] = "fa2"
    """FlashInfer's kernels to use for batches with prompts. `fa3` is for Hopper only and cannot read 8-bit KV; `auto`
    is FlashInfer's own choice. Decodes run `fa2`, which is faster for them. Batches with draft trees run `fa2`,
    because only it has masks."""

    workspace_mib: Annotated[int, Field(ge=1)] | None = None
    """Memory for partial results of long contexts, in MiB. By default 128, or 512 if 8 or more query heads share a KV
    head."""

    cascade: bool = False
    """Read a prefix that all running requests share once for all of them. This takes more launches, and pays off with
    long prefixes and many requests. Not used in replayed graphs and in layers with a window."""

    def provides(self, declared: frozenset[str]) -> frozenset[str]:
        return declared if self.cascade else declared - {"shared_prefix"}
