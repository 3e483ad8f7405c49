"""Models that keep states: logits and greedy tokens in chunks of many lengths, against transformers alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pegboard.conformance.model_family.base import TOLERANCE
from pegboard.conformance.rig.paged import PagedRun
from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.forward import BatchStates, StateRound
from pegboard.core.interfaces.model_family import ModelContext
from pegboard.plugins.model_transformers.family import TransformersFamily, relative_errors
from pegboard.plugins.model_transformers.network import TransformersNetwork
from pegboard.plugins.model_transformers.rounds import segments_of
from pegboard.plugins.model_transformers.segments import InSegments
from tests.plugins.model_transformers.test_served import loaded, probe_run
from tests.plugins.model_transformers.tiny import context, save
from tests.tools.state_families import STATE_FAMILIES

QUICK = ("mamba2", "minimax")
"""Latents beside states, no attention at all, a state with an interface of its own, and Mamba 1."""

PROMPTS = [[(7 * step + 5 * number) % 509 + 3 for step in range(length)] for number, length in enumerate((40, 23, 1))]
NEW = 4


def families(quick: tuple[str, ...]) -> list[object]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.full) for name in STATE_FAMILIES]


def tiny(name: str, directory: Path, dtype: torch.dtype = torch.float32) -> ModelContext:
    family = STATE_FAMILIES[name]
    ctx = context(save(directory, family.prefix, dict(family.fields)), dtype)
    return dataclasses.replace(ctx, context_length=family.context_length)


def computed(run: PagedRun, chunk: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Compute the prompts in one batch a step, each by chunks, and then greedy tokens; yield requests and logits."""
    texts = [list(prompt) for prompt in PROMPTS]
    last: dict[int, torch.Tensor] = {}
    while any(len(text) < len(prompt) + NEW for text, prompt in zip(texts, PROMPTS, strict=True)):
        new = {}
        for number, text in enumerate(texts):
            if (done := len(run.tokens[number])) < len(text):
                new[number] = text[done : done + chunk]
            elif len(text) < len(PROMPTS[number]) + NEW:
                text.append(int(last[number][-1].argmax()))
                new[number] = text[-1:]
        # A step of the second and third request is cut, wherever it is long enough.
        cuts = {number: len(run.tokens[number]) + 2 for number, part in new.items() if number and len(part) > 3}
        last = {**last, **run.step(new, cuts=cuts, decode=all(len(part) == 1 for part in new.values()))}
        yield from ((number, last[number]) for number in new)


@pytest.mark.parametrize("name", families(QUICK))
def test_chunks_of_any_length(name: str, tmp_path: Path) -> None:
    """Requests are at different places, so a batch has runs of several lengths, and decodes beside prompts."""
    ctx = tiny(name, tmp_path)
    family, network = loaded(ctx)
    assert family.spec.states
    for chunk in (1, 7, 64):
        run = PagedRun(network, family.spec)
        found: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
        for number, logits in computed(run, chunk):
            found[number].append(logits)
        for number, parts in found.items():
            ours, theirs = torch.cat(parts), network.reference_logits(run.tokens[number])
            assert float(relative_errors(ours, theirs).max()) < TOLERANCE, f"chunks of {chunk}"
            assert torch.equal(ours[-NEW:].argmax(-1), theirs[-NEW:].argmax(-1))


@pytest.mark.parametrize("name", families(("falcon_h1",)))
def test_the_probe_passes(name: str, tmp_path: Path) -> None:
    """In float32 and in bfloat16, where recurrent states may be float32 all the same."""
    # Of this random MiniMax transformers' own logits in bfloat16 are off by 0.3 from its logits in float32.
    for dtype in (torch.float32, *(() if name == "minimax" else (torch.bfloat16,))):
        ctx = tiny(name, tmp_path, dtype)
        family, network = loaded(ctx)
        family.probe(network, probe_run(network, family.spec, ctx))


def test_types_of_states(tmp_path: Path) -> None:
    family = TransformersFamily(None, tiny("falcon_h1", tmp_path, torch.bfloat16))  # type: ignore[arg-type]
    found = {state.name.rsplit(".", 2)[1]: state.dtype for state in family.spec.states}
    assert found == {"conv": "bfloat16", "recurrent": "float32"}


def test_mamba_1_is_run_token_by_token(tmp_path: Path) -> None:
    """It does not read its recurrent state when it gets several tokens. This is not left to the probe, which would not
    see it in bfloat16.
    """
    _, network = loaded(tiny("jamba", tmp_path))
    assert by_token(network) == {True}
    _, network = loaded(tiny("lfm2", tmp_path / "other"))
    assert by_token(network) == {False}


def by_token(network: TransformersNetwork) -> set[bool]:
    modules = (module.__dict__.get("forward") for module in network.model.modules())
    return {forward.kept.by_token for forward in modules if isinstance(forward, InSegments)}


def test_the_probe_sees_lost_states(tmp_path: Path) -> None:
    """Mamba 1 as if it read its states whenever it gets several tokens."""
    ctx = tiny("jamba", tmp_path)
    family, network = loaded(ctx)
    for module in network.model.modules():
        if isinstance(forward := module.__dict__.get("forward"), InSegments):
            forward.kept = dataclasses.replace(forward.kept, by_token=False)
    with pytest.raises(ModelError, match="gives wrong logits on paged attention"):
        family.probe(network, probe_run(network, family.spec, ctx))


def test_a_model_of_states_alone_has_no_layers_of_keys_and_values(tmp_path: Path) -> None:
    family = TransformersFamily(None, tiny("mamba2", tmp_path))  # type: ignore[arg-type]
    assert family.spec.layers == ()
    assert [group.layer_ids for group in family.spec.kv_groups] == [()]
    assert len(family.spec.states) == 4


def batch_states(*rounds: tuple[list[int], list[int]]) -> BatchStates:
    """Rounds of (firsts, lengths); run i reads slot 10 + i, and writes slot 20 + i."""
    return BatchStates(
        tuple(
            StateRound(
                np.array(firsts, dtype=np.int64),
                np.array(lengths, dtype=np.int64),
                torch.arange(10, 10 + len(firsts)),
                torch.arange(20, 20 + len(firsts)),
                torch.zeros(len(firsts), dtype=torch.bool),
            )
            for firsts, lengths in rounds
        ),
        {},
    )


def test_runs_of_one_length_are_a_segment() -> None:
    segments = segments_of(batch_states(([0, 3, 4, 7], [3, 1, 3, 1]), ([8], [2])), 10)
    rows = [None if one.rows is None else one.rows.tolist() for one in segments]
    assert rows == [[3, 7], [0, 1, 2, 4, 5, 6], [8, 9]]
    assert [one.sources.tolist() for one in segments] == [[11, 13], [10, 12], [10]]
    assert [one.targets.tolist() for one in segments] == [[21, 23], [20, 22], [20]]


def test_decodes_gather_nothing() -> None:
    (segment,) = segments_of(batch_states(([0, 1, 2], [1, 1, 1])), 3)
    assert segment.rows is None
    (segment,) = segments_of(batch_states(([1, 0], [1, 1])), 2)
    assert segment.rows is not None
    assert segment.rows.tolist() == [1, 0]
