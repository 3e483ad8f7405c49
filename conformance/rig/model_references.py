"""Tiny models for the suites of families and runners, and what transformers says of them.

Some prompts have states in place of tokens' embeddings, as prompts with pictures have: see `OverlaidPrompt`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.vl_checkpoints import VL_FAMILIES, vl_checkpoint
from pegboard.core.interfaces.forward import EmbedOverlay, ForwardBatch
from pegboard.core.interfaces.model_family import ModelContext

WINDOW = 16
"""Sliding window of the tiny checkpoints that have one; the longest prompt goes beyond three of them."""

_LENGTHS = (3 * WINDOW + 13, 21, 5)
_OVERLAID = ((*range(4, 30), *range(40, 61)), (0, 1, 2, *range(15, 21)), ())
"""Which tokens of each prompt have states: in two runs, at the beginning and at the end, and none."""

_LEVELS = 2


def model_checkpoint(directory: Path, architecture: str, **overrides: Any) -> Path:
    """Return a tiny checkpoint by a name of `ARCHITECTURES` or of `VL_FAMILIES`, of which `overrides` change the text
    part.
    """
    if architecture in VL_FAMILIES:
        return vl_checkpoint(directory, architecture, text=overrides)
    return tiny_checkpoint(directory, architecture, **overrides)


def read_config(directory: Path) -> dict[str, Any]:
    """Return the parsed config.json."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text("utf-8"))
    return config


def text_config(directory: Path) -> Mapping[str, Any]:
    """Return the part of config.json that describes the decoder."""
    config = read_config(directory)
    text: Mapping[str, Any] = config.get("text_config", config)
    return text


def context(directory: Path, *, context_length: int | None = None, **changes: Any) -> ModelContext:
    """Return the ModelContext of a checkpoint, with fields of its config.json changed: in the part of the decoder,
    where that stands by itself.
    """
    config = read_config(directory)
    if "text_config" in config:
        changes = {"text_config": {**config["text_config"], **changes}}
    return ModelContext(directory, {**config, **changes}, torch.float32, torch.device("cpu"), context_length)


@lru_cache(maxsize=32)
def prompts(directory: Path) -> tuple[list[int], ...]:
    """Random prompts for a checkpoint, one of them beyond three windows."""
    draw = torch.Generator().manual_seed(1)
    vocab = text_config(directory)["vocab_size"]
    return tuple(torch.randint(0, vocab, (length,), generator=draw).tolist() for length in _LENGTHS)


@lru_cache(maxsize=8)
def transformers_model(directory: Path) -> Any:
    """Return transformers' own model of a checkpoint, in float32 with eager attention."""
    import transformers

    kind = getattr(transformers, read_config(directory)["architectures"][0])
    return kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


@lru_cache(maxsize=32)
def reference_logits(directory: Path) -> tuple[torch.Tensor, ...]:
    """Return logits float32 [len, vocab] of `prompts` by transformers' own eager attention."""
    model = transformers_model(directory)
    with torch.inference_mode():
        return tuple(model(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts(directory))


@dataclass(frozen=True, eq=False)
class OverlaidPrompt:
    """A prompt whose tokens at `rows` int64 [m] have states [m, hidden] of their own, and `deep` ones. `positions` are
    int64 [len], or [3, len] for a model with three axes.
    """

    tokens: list[int]
    rows: torch.Tensor
    states: torch.Tensor
    deep: tuple[torch.Tensor, ...]
    positions: torch.Tensor

    def part(self, start: int, stop: int) -> OverlaidPrompt:
        """Return tokens [start, stop) with what they have."""
        kept = (self.rows >= start) & (self.rows < stop)
        return OverlaidPrompt(
            self.tokens[start:stop],
            self.rows[kept] - start,
            self.states[kept],
            tuple(level[kept] for level in self.deep),
            self.positions[..., start:stop],
        )

    def flat(self) -> OverlaidPrompt:
        """Return the same without deep states."""
        return replace(self, deep=())


def overlaid_prompts(directory: Path, axes: int) -> tuple[OverlaidPrompt, ...]:
    """Return `prompts` with random states for some of their tokens, and random positions where they have three axes.

    States are such as bfloat16 can hold, so that a model of that type sees the same.
    """
    draw = torch.Generator().manual_seed(2)
    width = text_config(directory)["hidden_size"]
    found = []
    for tokens, rows in zip(prompts(directory), _OVERLAID, strict=True):
        positions = torch.arange(len(tokens))
        if axes > 1:
            positions = positions + torch.randint(0, 30, (axes, len(tokens)), generator=draw)
        first, *deep = (torch.randn(len(rows), width, generator=draw).bfloat16().float() for _ in range(1 + _LEVELS))
        found.append(OverlaidPrompt(tokens, torch.tensor(rows, dtype=torch.int64), first, tuple(deep), positions))
    return tuple(found)


def lay_over(batch: ForwardBatch, parts: Sequence[OverlaidPrompt], dtype: torch.dtype = torch.float32) -> None:
    """Give a batch the overlay and the positions of the prompts that it consists of, in its order."""
    starts = torch.tensor([0, *(len(part.tokens) for part in parts)]).cumsum(0)
    levels = zip(*(part.deep for part in parts), strict=True)
    batch.overlay = EmbedOverlay(
        rows=torch.cat([part.rows + start for part, start in zip(parts, starts.tolist(), strict=False)]),
        states=torch.cat([part.states for part in parts]).to(dtype),
        deep=tuple(torch.cat(level).to(dtype) for level in levels),
    )
    batch.positions = torch.cat([part.positions for part in parts], -1)


def overlaid_logits(model: Any, prompt: OverlaidPrompt) -> torch.Tensor:
    """Return logits float32 [len, vocab] by `transformers_model`, in which hooks add deep states to layers' outputs."""
    with torch.inference_mode(), _deepened(model, prompt):
        logits: torch.Tensor = _run_overlaid(model, prompt).logits[0].float()
    return logits


def overlaid_states(model: Any, prompt: OverlaidPrompt) -> torch.Tensor:
    """As `reference_states`, of such a prompt."""
    with torch.inference_mode(), _deepened(model, prompt), _shown(model) as states:
        _run_overlaid(model, prompt)
    return torch.stack(states)


@lru_cache(maxsize=128)
def reference_states(directory: Path, prompt: tuple[int, ...]) -> torch.Tensor:
    """Return the states [places, len, hidden] of a prompt at all places that `Taps` knows, in their order, by
    transformers in float32.
    """
    model = transformers_model(directory)
    with torch.inference_mode(), _shown(model) as states:
        model(torch.tensor([prompt]), use_cache=False)
    return torch.stack(states)


def _run_overlaid(model: Any, prompt: OverlaidPrompt) -> Any:
    embeddings = model.get_input_embeddings()(torch.tensor([prompt.tokens]))
    embeddings[0, prompt.rows] = prompt.states.to(embeddings.dtype)
    return model(inputs_embeds=embeddings, position_ids=prompt.positions.unsqueeze(-2), use_cache=False)


@contextmanager
def _shown(model: Any) -> Iterator[list[torch.Tensor]]:
    """Collect what enters each layer inside the block, what leaves the last one, and what the decoder returns."""
    found: list[torch.Tensor] = []

    def enter(module: object, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        found.append((arguments[0] if arguments else named["hidden_states"])[0])

    def leave(module: object, arguments: object, output: Any) -> None:
        found.append((output if isinstance(output, torch.Tensor) else output[0])[0])

    decoder = model.get_decoder()
    handles = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in decoder.layers]
    handles += [decoder.layers[-1].register_forward_hook(leave), decoder.register_forward_hook(leave)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _deepened(model: Any, prompt: OverlaidPrompt) -> Iterator[None]:
    def hook(level: torch.Tensor) -> Any:
        def add(module: object, arguments: object, output: torch.Tensor) -> torch.Tensor:
            return output.index_add(1, prompt.rows, level[None].to(output.dtype))

        return add

    layers = model.get_decoder().layers
    handles = [layers[index].register_forward_hook(hook(level)) for index, level in enumerate(prompt.deep)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
