"""Latents (MLA) in whole engines and servers: answers are transformers', and a token takes one latent per layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.servers import serving
from pegboard.core.config.compose import compose
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.interfaces.sampling import SamplingParams
from tests.e2e.disagg_pair import pair
from tests.e2e.reference import Comparison, Reference
from tests.e2e.test_correctness import check_interpreted, config
from tests.e2e.test_scheduling_matrix import MATRIX, TIGHT, Cell, World, make_world, run_cell
from tests.e2e.test_scheduling_matrix import test_the_reference_is_what_it_should_be as check_world

LAYERS, RANK, ROPE = 3, 32, 8
"""Of the tiny checkpoint of DeepSeek-V3."""

NEW = 12


@pytest.fixture(scope="module")
def model(checkpoints: Path) -> Path:
    return tiny_checkpoint(checkpoints, "deepseek_v3")


@pytest.mark.full
@pytest.mark.slow
def test_served(model: Path, reference_dir: Path) -> None:
    prompt = [(7 * step) % 250 + 3 for step in range(30)]
    (expected,) = Reference(model, reference_dir).answers([prompt], NEW)
    data = {
        "model": {"path": str(model), "dtype": "float32", "device": "cpu"},
        "memory": {"max_total_tokens": 512},
        "scheduler": {"chunked_prefill_size": 16},
    }
    sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    with serving(data) as server, httpx.Client(base_url=server.address, timeout=60) as client:
        info = client.get("/server_info").json()["model_info"]
        # Twice: the second time its latents are found in the prefix cache.
        answers = [
            client.post("/generate", json={"input_ids": prompt, "sampling_params": sampling, "return_logprob": True})
            for _ in range(2)
        ]
    assert info["kv_bytes_per_token"] == LAYERS * (RANK + ROPE) * 4
    found = [answer.json() for answer in answers]
    comparison = Comparison()
    for number, answer in enumerate(found):
        comparison.add(answer["output_ids"], expected, f"answer {number}")
    comparison.finish()
    assert found[1]["meta_info"]["cached_tokens"] > 0


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_with_interpreted_triton(checkpoints: Path, reference_dir: Path) -> None:
    directory = tiny_checkpoint(checkpoints, "deepseek_v3", num_hidden_layers=1)
    chosen = config(directory, "radix", 16, attention="triton", scheduler={"chunked_prefill_size": 16})
    prompts = [[(7 * step) % 250 + 3 for step in range(length)] for length in (20, 3)]
    check_interpreted(reference_dir, [{"engine_config": chosen, "length": 3, "prompts": prompts}])


# ---- whatever the scheduler does ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(checkpoints: Path) -> World:
    """Without experts, so that sums in another order move logits by little: no token goes to another expert."""
    return make_world(tiny_checkpoint(checkpoints, "deepseek_v3", num_hidden_layers=2, first_k_dense_replace=2))


def test_references_are_those_of_transformers(world: World, reference_dir: Path) -> None:
    check_world(world, reference_dir)


CELLS = [
    Cell("fcfs", "overlap", 32, True, 16, TIGHT, "radix"),
    Cell("lpm", "normal", 32, False, 1, TIGHT, "radix"),
]
MORE = [
    cell
    for cell in MATRIX
    if (cell.policy, cell.cache, cell.tokens) == ("fcfs", "radix", TIGHT) and cell.chunk != 256 and cell not in CELLS
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_same_tokens_as_alone(cell: Cell, world: World) -> None:
    """In chunks, with hits in the prefix cache, in mixed batches and after retractions."""
    run_cell(cell, world)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cell", MORE, ids=str)
def test_same_tokens_as_alone_in_more_settings(cell: Cell, world: World) -> None:
    run_cell(cell, world)


# ---- where latents go -----------------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
PROMPTS = [[(7 * step) % 250 + 3 for step in range(40)] + [number] * 5 for number in (5, 9, 11)]


def small(model: Path, **more: Any) -> dict[str, Any]:
    memory = {"page_size": 4, "max_total_tokens": 1024, **more.pop("memory", {})}
    return {
        "model": {"path": str(model), "dtype": "float32", "device": "cpu", "context_length": 128},
        "log_level": "error",
        "memory": memory,
        **more,
    }


def ask(config: dict[str, Any]) -> tuple[list[list[int]], dict[str, Any]]:
    with Engine.from_config(config) as engine:
        found = [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]
        while engine.built.scheduler.busy:
            engine.built.scheduler.step()
        return found, engine.stats()


@pytest.fixture(scope="module")
def plain(world: World) -> list[list[int]]:
    return ask(small(world.checkpoint))[0]


def test_trees_of_drafts(world: World, plain: list[list[int]]) -> None:
    """Accepted branches are moved."""
    outputs = {" ".join(map(str, prompt)): tokens for prompt, tokens in zip(PROMPTS, plain, strict=True)}
    drafts = {"use": "drill", "outputs": outputs, "shape": "tree", "hit_rate": 0.7, "max_nodes": 8, "adaptive": False}
    drafted, stats = ask(small(world.checkpoint, speculation=drafts))
    assert stats["verify_steps"] > 0
    assert drafted == plain


def test_tiers(world: World, plain: list[list[int]], tmp_path: Path) -> None:
    """The second engine reads what the first one has stored."""
    files = [{"use": "files", "dir": str(tmp_path)}]
    more = {
        "memory": {"host": {"max_total_tokens": 2048}, "storage": files, "storage_block": 16},
        "prefix_cache": {"use": "hiradix", "prefetch_threshold": 16},
        "gates": [{"use": "prefetch", "policy": "wait_complete", "threshold": 16}],
    }
    for stored in (False, True):
        found, stats = ask(small(world.checkpoint, **more))
        assert found == plain
        assert (stats["cached_storage_tokens"] > 0) == stored


def test_disaggregation(world: World, plain: list[list[int]]) -> None:
    config = small(world.checkpoint)
    with pair(config, config) as both:
        answers, _ = both.ask([GenerateRequest(prompt=prompt, sampling=GREEDY) for prompt in PROMPTS])
        assert [answer.token_ids for answer in answers] == plain
        both.settle()
        both.check_books()


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention": {"use": "flashinfer"}}, "flashinfer .* lacks the capability latent, .*(MLA)"),
        ({"attention": {"use": "torch"}, "memory": {"kv_dtype": "fp8_e4m3"}}, r"no latents \(MLA\) in 8 bits"),
    ],
    ids=["attention", "8 bits"],
)
def test_refused(changes: dict[str, dict[str, str]], reason: str, model: Path) -> None:
    """Before weights are read, naming both."""
    data = {"model": {"path": str(model), "dtype": "float32", "device": "cpu"}, **changes}
    with pytest.raises(ConfigError, match=reason):
        Engine(compose(data=data, env={}))
