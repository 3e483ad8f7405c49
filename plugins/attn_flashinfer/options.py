"""Options of FlashInfer's kernels."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pegboard.core.interfaces.options import Options


class FlashInferOptions(Options):
    """Which kernels, and what memory they work in."""

    backend: Literal["fa2", "fa3", "auto"] = "fa2"
    """Which of FlashInfer's kernels run. `fa3` is for Hopper alone and reads no 8-bit KV; `auto` is FlashInfer's own
    choice. Batches with draft trees run `fa2`, the only one with masks."""

    workspace_mib: Annotated[int, Field(ge=1)] | None = None
    """Memory for the results of parts of long contexts, in MiB. By default 128, and 512 where 8 or more query heads
    share a KV head."""

    cascade: bool = False
    """Whether a prefix that all running requests share is read once for all of them. It takes more launches, and pays
    for long prefixes and many requests. Not in replayed graphs, and not in layers with a window."""

    def provides(self, declared: frozenset[str]) -> frozenset[str]:
        return declared if self.cascade else declared - {"shared_prefix"}
