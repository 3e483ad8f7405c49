"""Decode steps of transformers' modules as graphs: logits as without, or a reason why a model has none."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pegboard.conformance.attention.batches import QuietPool
from pegboard.conformance.model_family.base import TOLERANCE
from pegboard.conformance.model_runner.base import best_sampler
from pegboard.conformance.model_runner.fakes import Rig
from pegboard.conformance.rig.fixed_attention import FixedAttention
from pegboard.conformance.rig.paged import PagedRun
from pegboard.conformance.rig.tape import TapeCapture
from pegboard.core.interfaces.attention import AttentionContext
from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.core.interfaces.model_family import ModelContext
from pegboard.core.interfaces.model_runner import ModelRunnerContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.model_transformers.caches import CONV, CacheView
from pegboard.plugins.model_transformers.family import TransformersFamily, relative_errors
from pegboard.plugins.model_transformers.network import TransformersNetwork
from pegboard.plugins.runner_layered.options import LayeredOptions
from pegboard.plugins.runner_layered.runner import LayeredRunner
from tests.plugins.model_transformers.test_segments import families, tiny
from tests.plugins.model_transformers.test_served import loaded
from tests.plugins.model_transformers.tiny import SERVED, VOCAB, context, save

SIZES = (1, 2, 4)
LENGTH = 64
QUICK = ("gpt_neox", "gemma2", "phi3", "olmo2", "gpt_oss")

LATENT = frozenset(name for name, (_, fields) in SERVED.items() if "kv_lora_rank" in fields)
"""The suite's attention that graphs can have reads no latents."""


def names() -> list[object]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in SERVED]


def made(family: TransformersFamily, network: TransformersNetwork, capture: TapeCapture | None) -> Rig:
    """A started runner, with graphs of `SIZES` if there is a capture."""
    spec, ctx = family.spec, family.ctx
    sizes = SIZES if capture is not None else ()
    backend = FixedAttention(
        NoOptions(), AttentionContext(spec.layers, 4, ctx.dtype, ctx.device, 4, LENGTH, graph_sizes=sizes)
    )
    run = PagedRun(network, spec, attention=backend, dtype=ctx.dtype, requests=4, length=LENGTH)
    run.pool = QuietPool(None, KVPoolContext(LENGTH, 4, spec.layers, ctx.dtype, ctx.device))
    about = ModelRunnerContext(spec, ctx, network, backend, best_sampler(spec.vocab_size), (), ctx.device)
    provides = {"attention": FixedAttention.PROVIDES, "model_family": frozenset({"graph"})}
    about = dataclasses.replace(about, provides=provides, capture=capture, graph_sizes=sizes)
    options = LayeredOptions() if capture is None else LayeredOptions(graphs="on")
    runner = LayeredRunner(options, about)
    runner.start(run.pool, torch.from_numpy(run.table), states=run.slots.memory or None)
    return Rig(runner, run)


def compare(family: TransformersFamily, network: TransformersNetwork) -> None:
    """Decode requests that come and go, by graphs and without."""
    capture = TapeCapture()
    rigs = made(family, network, capture), made(family, network, None)
    prompts = {number: [(7 * step + number) % VOCAB for step in range(5 + 6 * number)] for number in range(4)}
    for rig in rigs:
        rig.step(prompts, None)
    for turn, requests in enumerate(([0, 1, 2], [3], [3, 1, 0, 2], [2, 0], [1, 2, 3])):
        new = {request: [(11 * turn + 5 * request) % VOCAB] for request in requests}
        by_graph, without = (rig.step(new, decode=True, return_logits=True).logits for rig in rigs)
        assert by_graph is not None
        assert without is not None
        # The graph has rows more, so that sums may be taken in another order.
        assert float(relative_errors(by_graph, without).max()) < TOLERANCE
    assert rigs[0].runner.figures() == {"replayed_steps": 5, "eager_decode_steps": 0}


@pytest.mark.parametrize("name", names())
def test_replays_have_the_logits_of_the_model(name: str, tmp_path: Path) -> None:
    family, network = loaded(context(save(tmp_path, *SERVED[name])))
    assert network.capture_objection() is None
    if name not in LATENT:
        compare(family, network)


def roped(directory: Path, kind: str) -> ModelContext:
    """A model whose frequencies would change beyond 32 tokens, served up to there."""
    rope: dict[str, object] = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        short, long = ([value] * 4 for value in (1.0, 3.0))
        rope |= {"short_factor": short, "long_factor": long, "original_max_position_embeddings": 32}
    prefix, fields = SERVED["phi3" if kind == "longrope" else "llama"]
    length = {} if kind == "longrope" else {"max_position_embeddings": 32}
    ctx = context(save(directory, prefix, {**fields, **length, "rope_parameters": rope}))
    return dataclasses.replace(ctx, context_length=32)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_lengths_are_held_still(kind: str, tmp_path: Path) -> None:
    """They are those that transformers would take."""
    import transformers

    ctx = roped(tmp_path, kind)
    _, network = loaded(ctx)
    assert network.capture_objection() is None
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = [(5 * step) % VOCAB for step in range(32)]
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt]), use_cache=False).logits[0]
    assert float(relative_errors(network.reference_logits(prompt), expected).max()) < TOLERANCE


class Waits(nn.Module):
    """Doubles what is negative, if something is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if bool((x < 0).any()) else x


class Counts(nn.Module):
    """Does more at each call."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for _ in range(self.calls):
            x = x * 1.0
        return x


class Brings(nn.Module):
    """Adds numbers that the host has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor([1.0] * x.shape[-1])


class Lists(nn.Module):
    """Reads them without an operator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(len(x.flatten().tolist()))


def put_behind_attention(network: TransformersNetwork, part: nn.Module) -> None:
    attention = network.model.model.layers[1].self_attn
    attention.o_proj = nn.Sequential(attention.o_proj, part)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (Waits, "model.layers.1.self_attn.o_proj.1: .*looks at data"),
        (Lists, "model.layers.1.self_attn.o_proj.1: Tensor.tolist"),
        (Brings, "model.layers.1.self_attn.o_proj.1: a tensor is made of the host's data"),
        (Counts, "two decode steps of one size differ: operation .* and then aten.mul.Tensor"),
    ],
)
def test_modules_that_no_graph_can_have(part: type[nn.Module], words: str, tmp_path: Path) -> None:
    """The reason names the module, or the operation."""
    _, network = loaded(context(save(tmp_path, *SERVED["llama"])))
    put_behind_attention(network, part())
    reason = network.capture_objection()
    assert reason is not None
    assert re.search(words, reason), reason


def test_experts_for_which_the_host_waits(tmp_path: Path) -> None:
    """torch has no product of rows of 4 * 18 bytes."""
    prefix, fields = SERVED["qwen3_moe"]
    _, network = loaded(context(save(tmp_path, prefix, {**fields, "moe_intermediate_size": 18})))
    reason = network.capture_objection()
    assert reason is not None
    assert reason.startswith("model.layers.0.mlp.experts: torch has no product of experts")


@pytest.mark.parametrize("name", families(("lfm2", "mamba2", "qwen3_5")))
def test_states_are_part_of_replays(name: str, tmp_path: Path) -> None:
    """Requests that pause keep their states, while others and padding write theirs."""
    family, network = loaded(tiny(name, tmp_path))
    assert network.capture_objection() is None
    if not any(layer.latent for layer in family.spec.layers):
        compare(family, network)


def test_modules_that_look_at_their_states(tmp_path: Path) -> None:
    """As one that asks its cache whether there are older tokens."""
    _, network = loaded(tiny("lfm2", tmp_path))
    segments = network.model.model.layers[0].conv.__dict__["forward"]
    inner = segments.compute

    def looks(call: inspect.BoundArguments, view: CacheView, *more: Any) -> object:
        assert bool(view.states[CONV, 0].isfinite().all())
        return inner(call, view, *more)

    segments.compute = looks
    reason = network.capture_objection()
    assert reason is not None
    assert reason.startswith("model.layers.0.conv: "), reason
    assert "looks at data" in reason


def test_what_is_tried_is_tried_once(tmp_path: Path) -> None:
    _, network = loaded(context(save(tmp_path, *SERVED["llama"])))
    assert network.capture_objection() is None
    put_behind_attention(network, Waits())
    assert network.capture_objection() is None
