"""Options of the family."""

from __future__ import annotations

from typing import Literal

from pegboard.core.interfaces.options import Options


class DenseOptions(Options):
    """Where the network's weights come from, and how they are kept."""

    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` draws random weights, for benchmarks: `model.path` needs no weights then, only config.json and a
    tokenizer. Set `model.use` to `dense` with it."""

    packed: Literal["auto", "on", "off"] = "auto"
    """Keep weights on a CPU in oneDNN's layout. `auto`: if possible; `on`: fail if it is not; `off`: keep them as they
    were read."""
