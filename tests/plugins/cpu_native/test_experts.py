"""Mixtures of experts in the native runner: numbers of tokens, sizes, layouts of checkpoints and instruction sets."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.plugins.cpu_native.runner import CpuNativeRunner
from tests.plugins.cpu_native.instruction_sets import SETS
from tests.plugins.cpu_native.test_accuracy import config
from tests.plugins.quantization.published import published
from tests.plugins.quantization.test_served import AWQ32

LENGTHS = (1, 2, 4, 5, 31, 33, 70, 140)
"""Alone and shared, fewer and more than a tile's rows, one expert's more than that."""
QWEN3 = partial(tiny_checkpoint, architecture="qwen3_moe")
SHAPES = {
    "odd": partial(QWEN3, hidden_size=90, moe_intermediate_size=37, num_experts=5, num_experts_per_tok=3),
    "one": partial(QWEN3, num_experts=1, num_experts_per_tok=1),
    "many": partial(QWEN3, num_experts=40, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=False),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def sharper(checkpoint: Path) -> Path:
    """Make the numbers of the experts and of the router small, once, so that bfloat16's noise moves the residual, and
    with it the router of the next layer, by little.
    """
    file, done = checkpoint / "model.safetensors", checkpoint / "sharper"
    if not done.exists():
        scaled = {name: one * 0.3 if ".experts." in name else one for name, one in load_file(file).items()}
        save_file(scaled, file, metadata={"format": "pt"})
        done.touch()
    return checkpoint


def found(checkpoint: Path, runner: dict[str, object]) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Return what logprobs a runner gives the tokens of prompts, and the tokens that it goes on with."""
    draw = np.random.default_rng(3)
    prompts = [draw.integers(3, 200, size=length).tolist() for length in LENGTHS]
    scheduler = {"chunked_prefill_size": 0}
    with Engine.from_config(config(checkpoint, runner=runner, scheduler=scheduler)) as engine:
        params = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)
        answers = [engine.generate([one], params, logprobs=0, logprob_start=0)[0] for one in prompts]
    values = [torch.tensor([value for value, _, _ in one.input_logprobs[1:]]) for one in answers]
    return values, [[*prompt, *one.token_ids] for prompt, one in zip(prompts, answers, strict=True)]


@cache
def reference(checkpoint: Path, dtype: torch.dtype) -> torch.nn.Module:
    """Return the model in transformers, whose loop over experts takes any size."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, experts_implementation="eager")
    assert isinstance(model, torch.nn.Module)
    return model.eval()


@torch.inference_mode()
def logprobs(checkpoint: Path, dtype: torch.dtype, ids: list[int]) -> torch.Tensor:
    """Of each token but the first, float32 [len - 1]."""
    table = reference(checkpoint, dtype)(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    return table.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)


def assert_as_good_as_bf16(checkpoint: Path, values: list[torch.Tensor], texts: list[list[int]]) -> None:
    """Compare with transformers in float32: the error is at most 1.25 of what transformers has in bfloat16, since a
    router's near-ties fall to either side in both.
    """
    ours, theirs = [], []
    for value, text in zip(values, texts, strict=True):
        if not len(value):
            continue
        exact = logprobs(checkpoint, torch.float32, text)[: len(value)]
        ours.append(value - exact)
        theirs.append(logprobs(checkpoint, torch.bfloat16, text)[: len(value)] - exact)
    ours_rms, theirs_rms = (float(torch.cat(one).square().mean().sqrt()) for one in (ours, theirs))
    assert ours_rms <= 1.25 * theirs_rms, f"error {ours_rms:.4f}, transformers in bf16 {theirs_rms:.4f}"


@pytest.mark.parametrize(
    ("shape", "instructions"),
    [
        pytest.param(shape, name, marks=[] if shape == "odd" and name == SETS[0] else pytest.mark.full)
        for shape in SHAPES
        for name in SETS
    ],
)
def test_shapes(directory: Path, shape: str, instructions: str) -> None:
    checkpoint = sharper(SHAPES[shape](directory))
    values, texts = found(checkpoint, {"use": "cpu_native", "instructions": instructions, "threads": 2})
    assert_as_good_as_bf16(checkpoint, values, texts)


def test_threads_do_not_change_answers(directory: Path) -> None:
    """Bit by bit: whoever computes a block, experts are added in their order."""
    checkpoint = tiny_checkpoint(directory, "qwen3_moe")
    (one, texts), (two, others) = (found(checkpoint, {"use": "cpu_native", "threads": n}) for n in (1, 2))
    assert texts == others
    for left, right in zip(one, two, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("turned", [False, True])
def test_experts_that_are_stored_together(directory: Path, tmp_path: Path, turned: bool) -> None:
    """In one tensor, as transformers 5 keeps them, either way round: the same answers."""
    checkpoint = tiny_checkpoint(directory, "qwen3_moe")
    joined: dict[str, torch.Tensor] = {}
    tensors = load_file(checkpoint / "model.safetensors")
    for layer in (1, 2):
        base = f"model.layers.{layer}.mlp.experts"
        up = [torch.cat([tensors.pop(f"{base}.{e}.{one}_proj.weight") for one in ("gate", "up")]) for e in range(6)]
        down = [tensors.pop(f"{base}.{e}.down_proj.weight") for e in range(6)]
        joined |= {f"{base}.gate_up_proj": torch.stack(up), f"{base}.down_proj": torch.stack(down)}
    joined = {name: one.transpose(1, 2).contiguous() if turned else one for name, one in joined.items()}
    for file in checkpoint.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(tensors | joined, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (one, texts), (other, others) = (found(path, {"use": "cpu_native"}) for path in (checkpoint, tmp_path))
    assert texts == others
    for left, right in zip(one, other, strict=True):
        assert torch.equal(left, right)


def test_experts_of_four_bits_stay_codes(directory: Path, tmp_path: Path) -> None:
    """Those of AWQ: the tokens of their exact weights, in 5 bits a number."""
    plain = tiny_checkpoint(directory, "qwen3_moe", hidden_size=64, moe_intermediate_size=64)
    coded, meant = published(tmp_path / "written", plain, AWQ32)
    (_, texts), (_, expected) = (found(path, {"use": "cpu_native"}) for path in (coded, meant))
    assert texts == expected
    with Engine.from_config(config(coded, runner={"use": "cpu_native"})) as engine:
        runner = engine.built.runner
        assert isinstance(runner, CpuNativeRunner)
        numbers, stored = runner.weights_by_format()["int4"]
        assert numbers >= 2 * 6 * 3 * 64 * 64, "all experts of two layers"
        assert stored * 8 == 5 * numbers
