"""Engines that take turns: what is compared meets the machine's other users alike."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.speculation import informed
from pegboard.core.config.compose import compose
from pegboard.core.engine.engine import Engine, GenerateOutput
from pegboard.core.interfaces.options import Options
from pegboard.core.interfaces.plugin import Plugin, Provider
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.trees import TokenTrees
from pegboard.core.registry.registry import Registry
from pegboard.plugins.speculation.api import DraftRow, Speculator, SpeculatorContext
from pegboard.toolkit.sampling.tree import join

MODEL = "demo:smollm2-135m-instruct"
NONE: Mapping[str, Any] = {"use": "none"}


class WrongOptions(Options):
    """Options of the speculator `wrong`."""

    nodes: int = 4
    """Nodes of each tree, its root included."""
    branches: bool = False
    """Children of the root in place of a chain."""

    def provides(self, declared: frozenset[str]) -> frozenset[str]:
        return declared if self.branches else declared - {"branches"}


class WrongSpeculator(Speculator[WrongOptions]):
    """Proposes tokens that hardly ever come: each step verifies so many nodes, at the same contexts as without them."""

    def __init__(self, options: WrongOptions, ctx: SpeculatorContext) -> None:
        super().__init__(options, ctx)
        self.max_nodes = min(options.nodes, ctx.max_nodes)
        self._random = np.random.default_rng(0)

    def propose(self, rows: Sequence[DraftRow]) -> TokenTrees:
        return join(self._tree(row) for row in rows)

    def _tree(self, row: DraftRow) -> TokenTrees:
        count = min(row.most, self.max_nodes)
        drafted = self._random.choice(self.ctx.spec.vocab_size, count - 1, replace=False)
        parents = np.arange(-1, count - 1)
        if self.options.branches:
            parents = np.minimum(parents, 0)
        return TokenTrees(np.array([count], np.int64), np.append(row.tokens[-1:], drafted), parents)


PLUGIN = Plugin(
    name="bench_speculation",
    version="0",
    requires=("speculation",),
    providers=(
        Provider(
            contract="speculator",
            name="wrong",
            factory=f"{__name__}:WrongSpeculator",
            config=f"{__name__}:WrongOptions",
            summary="proposes tokens that hardly ever come",
            provides=frozenset({"branches"}),
            rank=-1,
        ),
        informed.PROVIDER,
    ),
)


@dataclass
class Run:
    """One run: its wall time in seconds, what was answered, and what the scheduler counted meanwhile."""

    seconds: float
    outputs: list[GenerateOutput]
    stats: dict[str, float]

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return sum(len(one.token_ids) for one in self.outputs) / self.seconds

    @property
    def step(self) -> float:
        """Seconds of forward per step that decodes."""
        return self.stats["forward_time"] / self.stats["decode_steps"]


@contextlib.contextmanager
def engines(configs: Mapping[str, Mapping[str, Any]], **more: Any) -> Iterator[dict[str, Engine]]:
    """One engine for each config of `speculation`, by name."""
    registry = Registry.discover().with_plugins(PLUGIN, distribution="pegboard", version="0")
    with contextlib.ExitStack() as stack:
        made = {}
        for name, speculation in configs.items():
            config = {
                "model": {"path": MODEL},
                "memory": {"max_total_tokens": 32768},
                "speculation": dict(speculation),
                "log_level": "warning",
                **more,
            }
            made[name] = stack.enter_context(Engine(compose(data=config, registry=registry)))
        yield made


def chat(engine: Engine, text: str) -> list[int]:
    """Return a prompt with a user's message."""
    rendered = engine.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    return engine.tokenizer.encode(rendered, add_special_tokens=False)


def run(
    engine: Engine, prompts: Sequence[list[int]], streams: int, sampling: SamplingParams, *, keep: bool = False
) -> Run:
    """Answer prompts, `streams` at a time. `keep`: what is cached stays."""
    if not keep:
        engine.flush_cache()
    before, outputs = engine.stats(), []
    start = time.perf_counter()
    for first in range(0, len(prompts), streams):
        outputs += engine.generate(list(prompts[first : first + streams]), sampling)
    seconds, after = time.perf_counter() - start, engine.stats()
    keys = ("forward_time", "decode_steps", "drafted_tokens", "accepted_tokens", "drafted_requests", "draft_time")
    return Run(seconds, outputs, {key: after[key] - before[key] for key in keys})
