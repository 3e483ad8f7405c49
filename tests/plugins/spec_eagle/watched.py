"""An engine with a head whose every entry and tree is compared with the plain statement."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pegboard.conformance.model_family.base import TOLERANCE
from pegboard.conformance.rig.model_references import transformers_model
from pegboard.core.config.compose import compose
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.forward import ForwardBatch
from pegboard.core.interfaces.plugin import Plugin, Provider
from pegboard.core.interfaces.trees import TokenTrees
from pegboard.core.registry.registry import Registry
from pegboard.plugins.spec_eagle.options import EagleOptions
from pegboard.plugins.spec_eagle.speculator import EagleSpeculator
from pegboard.plugins.speculation.api import DraftBatch, SpeculatorContext, Stands
from pegboard.toolkit.sampling import tree
from tests.plugins.spec_eagle.heads import Head
from tests.plugins.spec_eagle.plain import PlainHead


class Watch:
    """What a watched head is compared with, and what was found. `future` has answers by prompt: drafts follow them at
    every other step, so that runs are accepted; without it drafts are the head's own.
    """

    def __init__(self, plain: PlainHead, future: dict[tuple[int, ...], list[int]] | None = None) -> None:
        self.plain = plain
        self.future = future or {}
        self.errors: list[str] = []
        self.fail = 0
        """So many passes cannot be observed."""
        self.entries = self.trees = self.looked_back = self.deepest = 0

    def foreseen(self, context: tuple[int, ...], most: int) -> TokenTrees | None:
        for prompt, answer in self.future.items():
            text = (*prompt, *answer)
            if text[: len(context)] == context and len(context) >= len(prompt):
                return tree.chains([(context[-1], list(text[len(context) : len(context) + most - 1]))])
        return None


WATCHES: list[Watch] = []
"""The one of the engine that is built next."""


class WatchedEagle(EagleSpeculator):
    """Keeps which token is in which slot, and so knows each row's context."""

    def __init__(self, options: EagleOptions, ctx: SpeculatorContext) -> None:
        super().__init__(options, ctx)
        self.watch = WATCHES[-1]
        self.tokens = np.full(2**16, -1, np.int64)
        self.turn = 0

    def observe(self, batch: ForwardBatch, taps: torch.Tensor, stands: Stands) -> None:
        if self.watch.fail:
            self.watch.fail -= 1
            taps = taps[:0]  # there is nothing to read the states from
        super().observe(batch, taps, stands)
        table, ids = batch.kv_groups[0].row_table.numpy(), batch.input_ids[stands.tokens].numpy()
        places = tree.starts(stands.counts)
        for index, row in enumerate(batch.req_pool_indices.tolist()):
            start, count = int(stands.starts[index]), int(stands.counts[index])
            slots = table[row, start : start + count]
            self.tokens[slots] = ids[places[index] : places[index] + count]
            self.watch.looked_back += bool(stands.fresh[index] and start)
            self.compare(batch, table[row, : start + count])

    def compare(self, batch: ForwardBatch, slots: np.ndarray[Any, Any]) -> None:
        context = tuple(self.tokens[slots].tolist())
        if len(context) < 2 or -1 in context:
            return
        layer = self.layers[0].layer_id
        where = torch.from_numpy(slots[1:]).long()
        with torch.inference_mode():
            expected = self.watch.plain.entries(context)
        for one, pool in zip(expected, (batch.kv_pool.keys(layer), batch.kv_pool.values(layer)), strict=True):
            off = float((pool[where] - one).abs().max() / one.abs().max())
            if off > TOLERANCE:
                self.watch.errors.append(f"entries of {len(context)} tokens are off by {off:.2g}")
        self.watch.entries += len(context) - 1

    def draft(self, batch: DraftBatch) -> TokenTrees:
        found = super().draft(batch)
        table, self.turn = batch.row_table.numpy(), self.turn + 1
        answer = []
        rows = zip(
            batch.rows.tolist(), batch.seq_lens.tolist(), batch.newest.tolist(), batch.most.tolist(), strict=True
        )
        for index, (row, length, newest, most) in enumerate(rows):
            context = (*self.tokens[table[row, : length - 1]].tolist(), newest)
            own = tree.take_part(found, np.array([index]))
            if -1 in context:  # of tokens that were not observed nothing is known
                if own.counts[0] > 1:
                    self.watch.errors.append(f"a draft behind tokens that were not observed: {own}")
                answer.append(own)
                continue
            nodes = min(most, self.max_nodes)
            with torch.inference_mode():
                expected = self.watch.plain.tree(context, self.options.topk, min(self.options.steps, nodes - 1), nodes)
            if (own.tokens.tolist(), own.parents.tolist()) != expected:
                self.watch.errors.append(f"tree of {len(context)} tokens: {own} is not {expected}")
            self.watch.trees += 1
            self.watch.deepest = max(self.watch.deepest, int(tree.depths(own).max()))
            foreseen = self.watch.foreseen(context, nodes) if self.turn % 2 else None
            answer.append(foreseen or own)
        return tree.join(answer)


PLUGIN = Plugin(
    name="watched_eagle",
    version="0",
    providers=(
        Provider(
            contract="speculator",
            name="watched_eagle",
            factory=f"{__name__}:WatchedEagle",
            config="pegboard.plugins.spec_eagle.options:EagleOptions",
            summary="an EAGLE head that is watched",
            provides=frozenset({"branches", "device", "judges"}),
            rank=-1,
        ),
    ),
)


@contextlib.contextmanager
def watched_engine(
    model: Path, directory: Path, head: Head, future: dict[tuple[int, ...], list[int]] | None = None, **settings: Any
) -> Iterator[tuple[Engine, Watch]]:
    """An engine in float32 with a watched head; `settings` are those of `speculation`, or whole sections."""
    watch = Watch(PlainHead(directory, head, transformers_model(model)), future)
    WATCHES.append(watch)
    registry = Registry.discover().with_plugins(PLUGIN, distribution="pegboard", version="0")
    sections: dict[str, Any] = {
        name: settings.pop(name) for name in ("scheduler", "memory", "prefix_cache") if name in settings
    }
    config: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32"},
        "runner": {"use": "layered"},
        "memory": {"max_total_tokens": 4096},
        "speculation": {
            "use": "watched_eagle",
            "draft": str(directory),
            "adaptive": False,
            "max_nodes": 12,
            **settings,
        },
        "log_level": "error",
        **sections,
    }
    try:
        with Engine(compose(data=config, registry=registry)) as engine:
            yield engine, watch
    finally:
        WATCHES.remove(watch)
