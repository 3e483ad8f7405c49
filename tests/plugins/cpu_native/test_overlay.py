"""States in place of embeddings, deep states and positions of three axes: to the bit where bf16 loses nothing, and as
good as transformers in bf16 elsewhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from pegboard.conformance.model_runner import ModelRunnerContract
from pegboard.conformance.model_runner.fakes import Rig
from pegboard.conformance.rig.model_references import (
    OverlaidPrompt,
    lay_over,
    overlaid_logits,
    overlaid_prompts,
    prompts,
    read_config,
    transformers_model,
)
from pegboard.core.interfaces.forward import EmbedOverlay
from tests.plugins.cpu_native.instruction_sets import EACH

WIDTH = 64


class Native(ModelRunnerContract):
    """The suite's models and memory; its tests run elsewhere."""

    __test__ = False
    provider = "cpu_native"
    dtype = "bfloat16"

    def __init__(self, **options: Any) -> None:
        type(self).options = options


class NativeQwen2(Native):
    __test__ = False
    tower = "qwen2_vl"


def logits_of(rig: Rig, request: int, parts: list[OverlaidPrompt]) -> torch.Tensor:
    """Return logits of all tokens of prompts that are computed as one batch."""
    batch = rig.run.batch({request + index: part.tokens for index, part in enumerate(parts)})
    lay_over(batch, parts, torch.bfloat16)
    batch.logits_indices = torch.arange(batch.num_tokens)
    logits = rig.runner.execute(batch, None, return_logits=True).logits
    assert logits is not None
    return logits


def as_embedded(rig: Rig, rows: list[int], levels: int = 0) -> OverlaidPrompt:
    """Return a prompt whose states are what the model's own table has, and deep ones that add nothing."""
    directory = rig.runner.ctx.model.directory
    tokens = prompts(directory)[0]
    table = load_file(directory / "model.safetensors")["model.embed_tokens.weight"].bfloat16().float()
    deep = tuple(torch.zeros(len(rows), WIDTH) for _ in range(levels))
    states = table[torch.tensor([tokens[row] for row in rows], dtype=torch.int64)]
    return OverlaidPrompt(tokens, torch.tensor(rows, dtype=torch.int64), states, deep, torch.arange(len(tokens)))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [[0], [60], [7, 9, 10, 31, 32, 33, 59], list(range(61)), []], ids=len)
def test_states_that_the_table_has_change_nothing(rows: list[int], threads: int) -> None:
    """Not a bit, in any number of threads; and levels beyond the last layer are not added anywhere."""
    rig = Native(threads=threads).rig()
    plain = logits_of(rig, 0, [as_embedded(rig, [])])
    assert torch.equal(logits_of(rig, 1, [as_embedded(rig, rows)]), plain)
    assert torch.equal(logits_of(rig, 2, [as_embedded(rig, rows, levels=5)]), plain)


@pytest.mark.parametrize("instructions", EACH)
@pytest.mark.parametrize("suite", [Native, NativeQwen2])
def test_as_good_as_bf16_is(suite: type[Native], instructions: str) -> None:
    """Prompts of 61, 21 and 5 tokens, with deep states and positions of three axes, in one batch and alone."""
    kit = suite(instructions=instructions, threads=2)
    model = kit.make_tower()
    directory = model.model.directory
    kind = getattr(transformers, read_config(directory)["architectures"][0])
    half = kind.from_pretrained(directory, dtype=torch.bfloat16, attn_implementation="eager").eval()
    given = list(overlaid_prompts(directory, 3))
    exact = torch.cat([overlaid_logits(transformers_model(directory), prompt) for prompt in given])
    theirs = torch.cat([overlaid_logits(half, prompt) for prompt in given]) - exact
    together = logits_of(kit.rig(model=model), 0, given) - exact
    alone = torch.cat([logits_of(kit.rig(model=model), 0, [prompt]) for prompt in given]) - exact
    for ours in (together, alone):
        rms, bound = (float(one.square().mean().sqrt()) for one in (ours, theirs))
        assert rms <= bound, f"error {rms:.4f}, transformers in bf16 {bound:.4f}"
        assert float(ours.abs().max()) <= 1.5 * float(theirs.abs().max())


@pytest.mark.parametrize(
    "change",
    [
        {"rows": torch.tensor([3, 61])},
        {"rows": torch.tensor([-1, 3])},
        {"rows": torch.tensor([4, 3])},
        {"rows": torch.tensor([3, 3])},
        {"rows": torch.tensor([3])},
        {"states": torch.zeros(2, WIDTH - 1)},
        {"deep": (torch.zeros(2, WIDTH), torch.zeros(3, WIDTH))},
    ],
    ids=str,
)
def test_an_overlay_that_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    """Native code would read and write beyond its memory."""
    rig = Native(threads=1).rig()
    batch = rig.run.batch({0: prompts(rig.runner.ctx.model.directory)[0]})
    good = EmbedOverlay(torch.tensor([3, 9]), torch.zeros(2, WIDTH), (torch.zeros(2, WIDTH),))
    batch.overlay = replace(good, **change)
    with pytest.raises(ValueError, match=r"an overlay needs ascending rows below 61 and states \[\d, 64\]"):
        rig.runner.execute(batch, None)
