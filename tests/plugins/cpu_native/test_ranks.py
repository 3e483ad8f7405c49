"""Ranks of the native runner: they hold the same bits, and rank 0 has logits as good as those of one process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pegboard.conformance.model_runner import ModelRunnerContract
from pegboard.conformance.model_runner.fakes import Rig
from pegboard.conformance.rig.ranks import on_ranks
from pegboard.core.interfaces.forward import Taps
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.cpu_native.runner import CpuNativeRunner
from pegboard.plugins.parallel.api import CommunicatorContext
from pegboard.plugins.parallel.shm import Shm
from pegboard.toolkit.model.ranks import Ranks
from tests.plugins.cpu_native.instruction_sets import EACH

LENGTHS = (128, 120, 1, 40)
"""More tokens than a slot has: they are added up in two pieces, the last of which is no whole block of a product."""
SECONDS = 60.0


class Native(ModelRunnerContract):
    """The suite's models and memory; its tests run elsewhere. With 3 ranks each has 44 columns of `down`, and with 6
    ranks one has no part of the vocabulary.
    """

    __test__ = False
    provider = "cpu_native"
    dtype = "bfloat16"

    def __init__(self, architecture: str = "llama", kv_heads: int = 6, *, biases: bool = False, **options: Any) -> None:
        type(self).options = options
        type(self).architecture = architecture
        type(self).checkpoint_settings = {
            "hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": kv_heads, "head_dim": 16,
            "intermediate_size": 132, **({"attention_bias": True, "mlp_bias": True} if biases else {}),
        }  # fmt: skip


@dataclass
class Found:
    """What a rank has computed of a prefill and of a decode step."""

    states: list[Tensor]
    hidden: list[Tensor]
    logits: list[Tensor]


def ids() -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(3, 320, (length,), generator=draw).tolist() for length in LENGTHS]


def pass_of(rig: Rig, new: Mapping[int, list[int]], found: Found, *, decode: bool = False) -> None:
    batch = rig.run.batch(new, decode=decode)
    batch.taps, batch.hidden_rows = Taps((0, 1, 2, 3)), torch.arange(batch.num_tokens)
    batch.logits_indices = torch.arange(batch.num_tokens)
    output = rig.runner.execute(batch, None, return_logits=True)
    assert output.row_states is not None
    assert output.logits is not None
    found.states.append(batch.taps.joined())
    found.hidden.append(output.row_states)
    found.logits.append(output.logits)


def computed(kit: Native) -> Callable[[Ranks], Found]:
    """Return what a rank does: all tokens but the last of each request, then those that are left, in a decode step."""
    prompts = ids()
    extends = {one: prompt[:-1] for one, prompt in enumerate(prompts) if len(prompt) > 1}
    decodes = {one: prompts[one][-1:] for one in extends}

    def does(ranks: Ranks) -> Found:
        rig, found = kit.rig(model=kit.make_shared(ranks)), Found([], [], [])
        pass_of(rig, extends, found)
        pass_of(rig, decodes, found, decode=True)
        return found

    return does


def exact(kit: Native) -> list[Tensor]:
    """Return transformers' logits of both passes, in float32."""
    prompts = [kit.expected(prompt) for prompt in ids() if len(prompt) > 1]
    return [torch.cat([one[:-1] for one in prompts]), torch.stack([one[-1] for one in prompts])]


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


@pytest.mark.parametrize("instructions", EACH)
@pytest.mark.parametrize(("size", "threads"), [(2, 1), (2, 3), (3, 2), (6, 1)])
def test_ranks_hold_the_same_bits(instructions: str, size: int, threads: int) -> None:
    """Of the residual at each place, and of the last hidden states in float32. The logits are off by as much as those
    of one process: each product takes bf16, and a sum in another order may be rounded to another number.
    """
    kit = Native(instructions=instructions, threads=threads)
    (alone,), (first, *others) = on_ranks(1, computed(kit)), on_ranks(size, computed(kit))
    for other in others:
        for step in range(2):
            assert torch.equal(other.states[step], first.states[step])
            assert torch.equal(other.hidden[step], first.hidden[step])
    for step, right in enumerate(exact(kit)):
        assert torch.equal(first.states[step][:, :72], alone.states[step][:, :72]), "embeddings are not rounded"
        assert rms(first.logits[step] - right) <= 1.2 * rms(alone.logits[step] - right)
        assert float((first.logits[step] - right).abs().max()) <= 2 * float((alone.logits[step] - right).abs().max())


@pytest.mark.parametrize(("architecture", "kv_heads"), [("llama", 1), ("qwen2", 2), ("qwen3", 2)])
def test_shares_of_all_kinds_of_tensors(architecture: str, kv_heads: int) -> None:
    """KV heads that several ranks have, biases of rows, norms of heads."""
    kit = Native(architecture, kv_heads, threads=1)
    (alone,), (first, other) = on_ranks(1, computed(kit)), on_ranks(2, computed(kit))
    for step, right in enumerate(exact(kit)):
        assert torch.equal(other.states[step], first.states[step])
        assert rms(first.logits[step] - right) <= 1.2 * rms(alone.logits[step] - right)


def test_biases_of_partial_sums_are_added_once() -> None:
    kit = Native(biases=True, threads=1)
    (alone,), (first, _) = on_ranks(1, computed(kit)), on_ranks(2, computed(kit))
    for step, right in enumerate(exact(kit)):
        assert rms(first.logits[step] - right) <= 1.2 * rms(alone.logits[step] - right)


def test_each_rank_keeps_its_share_alone() -> None:
    kit = Native(threads=1)

    def weighs(ranks: Ranks) -> tuple[int, int]:
        rig = kit.rig(model=kit.make_shared(ranks))
        assert isinstance(rig.runner, CpuNativeRunner)
        return sum(numbers for numbers, _ in rig.runner.weights_by_format().values()), rig.pool.nbytes

    ((numbers, kv),), shares = on_ranks(1, weighs), on_ranks(2, weighs)
    assert [one for _, one in shares] == [kv // 2] * 2
    padding = 2 * 64 * 72
    assert all(numbers // 2 <= one <= numbers // 2 + padding for one, _ in shares)


def runner_of(meeting: str, index: int) -> tuple[Native, Rig, Shm]:
    shm = Shm(NoOptions(), CommunicatorContext(2, index, torch.device("cpu")))
    shm.connect(Path(meeting), SECONDS)
    ranks, kit = Ranks(2, index), Native(threads=2)
    ranks.connect(shm)
    return kit, kit.rig(model=kit.make_shared(ranks)), shm


def dies(meeting: str) -> None:
    """Compute one batch, and be killed before the next one."""
    _, rig, _ = runner_of(meeting, 1)
    pass_of(rig, {0: ids()[0]}, Found([], [], []))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_is_killed_does_not_hold_the_others_up() -> None:
    """They wait within the library, in two threads."""
    with tempfile.TemporaryDirectory() as meeting:
        process = multiprocessing.get_context("spawn").Process(target=dies, args=(meeting,))
        process.start()
        kit, rig, shm = runner_of(meeting, 0)
        found = Found([], [], [])
        pass_of(rig, {0: ids()[0]}, found)
        process.join(SECONDS)
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1 has ended"):
            pass_of(rig, {1: ids()[1]}, found)
        assert time.monotonic() - started < SECONDS / 2
        with pytest.raises(RuntimeError, match="rank 1 has ended"):
            pass_of(rig, {2: ids()[2]}, found)
        shm.close()
    assert process.exitcode == -signal.SIGKILL
    assert rms(found.logits[0] - kit.expected(ids()[0])) < 0.05 * float(kit.expected(ids()[0]).abs().max())
