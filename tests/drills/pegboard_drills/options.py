"""Options of the drills."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pegboard.core.interfaces.admission_gate import GateOptions
from pegboard.core.interfaces.options import Options

Act = Literal["open", "delay", "fail", "never", "raise", "bring"]
Lie = Literal[
    "no",
    "nothing",
    "type",
    "lists",
    "missing",
    "empty",
    "many",
    "lengths",
    "order",
    "roots",
    "parent",
    "root",
    "vocabulary",
    "negative",
    "siblings",
]


class DrillGateOptions(GateOptions):
    """Options of `drill`. A request says otherwise with ``params["drill"]``, under the same names."""

    timeout: float | None = Field(default=5.0, gt=0)
    """Seconds that a request may wait here; then it ends with status 504. null: for ever."""

    act: Act = "open"
    """What happens to a request: let through, `delay`ed, failed after the delay, never answered, the gate raises, or it
    asks for memory and brings KV.
    """

    delay: float = Field(default=0.1, ge=0)
    """Seconds before the gate opens or fails."""

    hold: float = Field(default=0.0, ge=0)
    """Seconds for which a finished request's KV is kept."""

    token: int | None = None
    """The token that comes with the KV it brings, `delay` seconds after the request got memory."""

    length: int | None = None
    """Tokens of the prompt that it brings KV of; all unless set."""

    linger: float = Field(default=0.0, ge=0)
    """Seconds for which the memory of a request that has ended early is still written to."""

    most: int | None = None
    """Tokens that a request gets at most."""


class DrillSpeculatorOptions(Options):
    """Options of the speculator `drill`."""

    outputs: dict[str, tuple[int, ...]] = {}
    """What requests will say: their output's token ids, by their prompt's, which are written with spaces between."""

    file: str | None = None
    """A JSON file of more `outputs`."""

    noise: bool = False
    """Also draft, always wrongly, for other prompts and beyond the end of an output."""

    hit_rate: float = Field(default=1.0, ge=0, le=1)
    """How often a position is drafted right; always alike for one seed, prompt and position."""

    seed: int = 0
    """Decides which positions are hits, what is drafted instead, and the shapes."""

    shape: Literal["chain", "tree"] = "chain"
    """A chain, or a random tree that has the right tokens among wrong ones."""

    nodes: int = Field(default=8, ge=1, le=64)
    """Most nodes of a tree, its root included."""

    ragged: bool = False
    """Draft a random number of nodes, the root alone included, instead of as many as may be."""

    every: int = Field(default=1, ge=1)
    """Raise in `propose`, be slow and lie at each so manieth call only."""

    raises: Literal["no", "concerns", "propose", "learn"] = "no"
    """Where it raises."""

    slow: float = Field(default=0.0, ge=0)
    """Seconds that `propose` takes."""

    lies: Lie = "no"
    """What is wrong with the last tree of each answer."""

    def provides(self, declared: frozenset[str]) -> frozenset[str]:
        return declared if self.shape == "tree" else declared - {"branches"}


class RankDrillOptions(Options):
    """Of the forward passes that raise."""

    directory: str = ""
    """Where a file named as a process's number has its next pass raise; one that says "leave" ends the process. Empty:
    no pass raises."""
