"""Decode steps, prefills and mixed batches as graphs: the same tokens as without, whatever the scheduler does.

A CPU's graphs (`TapeCapture`) are as forgetful as a device's: what is not in a fixed place is as it was when the graph
was recorded, and one graph's memory is overwritten by the next. Requests come, go, are aborted and are retracted, so
that batches have between 1 and 64 requests in no order. What the same requests are answered without graphs is the
reference; an answer may leave it where two tokens are so close that the order of sums decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from pegboard.conformance.checkpoints import VOCAB_SIZE, tiny_checkpoint
from pegboard.conformance.covering import covering
from pegboard.conformance.rig.fixed_attention import FixedExtends
from pegboard.conformance.rig.tape import TapeCapture
from pegboard.core.config.compose import compose
from pegboard.core.engine.engine import Engine, GenerateOutput
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.plugin import Plugin, Provider
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.registry.registry import Registry
from pegboard.toolkit.graphs import default_sizes, recorded

MOST = 64
"""Requests that run at once."""
CONTEXT = 96
WINDOWS = "mistral-windows"
"""Mistral with `memory.window_pages`."""
TIGHT, ROOMY = 1024, 8192
"""Tokens of the pool."""
NEAR_TIE = {"auto": 1e-3, "fp8_e4m3": 0.02}
"""Difference of the two best logprobs below which either token is right. In 8 bits float32 sums in another order may
round a key or value to its other neighbour, which moves a logprob by some thousandths."""
BURSTS = (70, 25, 9, 6, 5, 2, 2, 1)
"""Requests that come at once."""
MIN_COMPARED = 0.9
"""Share of all tokens that must have been compared."""
MIN_REPLAYED = 0.8
"""Share of decode steps, and of prefills, that must have been replays."""
PREFILLS = (8, 32, 64, 128, 320)
"""Tokens of prefills that are graphs."""

FIXED = Plugin(
    name="fixed",
    version="1",
    summary="attention that graphs can have",
    providers=(
        Provider(
            contract="attention",
            name="fixed",
            factory="pegboard.conformance.rig.fixed_attention:FixedExtends",
            summary="for tests",
            provides=FixedExtends.PROVIDES,
        ),
    ),
)


class Cell(NamedTuple):
    """One arrangement."""

    loop: str
    page_size: int
    model: str
    kv: str
    chunk: int
    mixed: bool
    tokens: int

    def config(self, path: Path, **more: object) -> dict[str, object]:
        return {
            "model": {"path": str(path), "dtype": "float32", "device": "cpu", "context_length": CONTEXT},
            "attention": {"use": "fixed"},
            "runner": {"use": "layered", "prefill_graph_sizes": PREFILLS},
            "memory": {
                "page_size": self.page_size,
                "max_total_tokens": self.tokens,
                "kv_dtype": self.kv,
                "window_pages": self.model == WINDOWS,
                "typical_length": 32,  # so that pages of windows are not what is short
            },
            "scheduler": {
                "loop": self.loop,
                "chunked_prefill_size": self.chunk,
                "mixed_chunk": self.mixed,
                "max_running_requests": MOST,
                # In the tight pool admission reckons with next to no growth, so that running requests have to go.
                "estimate_max_new_tokens": 1 if self.tokens == TIGHT else 4096,
            },
            "log_level": "error",
            **more,
        }

    def __str__(self) -> str:
        parts = self.loop, f"page_{self.page_size}", self.model, self.kv, f"chunk_{self.chunk}"
        return "-".join((*parts, "mixed" if self.mixed else "apart", "tight" if self.tokens == TIGHT else "roomy"))


PLAIN, EXPERTS = (Cell("normal", 16, model, "auto", 0, False, ROOMY) for model in ("llama", "qwen3_moe"))
VALUES: tuple[Sequence[Any], ...] = (
    ("overlap", "normal"),
    (1, 16),
    (WINDOWS, "mistral", "llama"),
    ("fp8_e4m3", "auto"),
    (32, 256),
    (False, True),
    (TIGHT, ROOMY),
)
"""Mistral has a window of 32 tokens, whose pages are given back with WINDOWS."""
ALL = [Cell(*values) for values in itertools.product(*VALUES)]
SEEDS = [cell for cell in ALL if cell.model != WINDOWS]
"""The place of a cell is its seed. One with WINDOWS has that of the same one without."""
FEW = [Cell("overlap", 16, WINDOWS, "auto", 256, True, TIGHT)]
PLAIN_TIGHT = FEW[0]._replace(model="llama")
REST = [PLAIN_TIGHT, *covering(SEEDS, beside=[PLAIN_TIGHT])]


@dataclass
class Answer:
    """What a request is answered without graphs. `gaps` says of each token how far the runner-up was behind."""

    request: GenerateRequest
    tokens: list[int]
    gaps: list[float]


@dataclass
class World:
    """Checkpoints, and answers by checkpoint and type of KV."""

    directory: Path
    found: dict[tuple[str, str], list[Answer]] = field(default_factory=dict)

    def path(self, model: str) -> Path:
        return tiny_checkpoint(self.directory, model.partition("-")[0], num_hidden_layers=2)

    def answers(self, cell: Cell) -> list[Answer]:
        """Without groups of windows, which are to change nothing."""
        key = cell.model.partition("-")[0], cell.kv
        if key not in self.found:
            settings: dict[str, Any] = dict(zip(Cell.__annotations__, PLAIN, strict=True))
            plain = Cell(**{**settings, "model": key[0], "kv": cell.kv})
            with engine_of(plain, self, None) as engine:
                requests = make_requests()
                answered = zip(requests, engine.run(requests), strict=True)
                assert engine.stats()["runner"] == {}
            self.found[key] = [Answer(request, one.token_ids, _gaps(one)) for request, one in answered]
        return self.found[key]


@pytest.fixture(scope="module")
def world(checkpoints: Path) -> World:
    return World(checkpoints)


def make_requests() -> list[GenerateRequest]:
    """Prompts of 1 to 45 tokens, some with a common beginning, and answers of 20 to 48."""
    draw = np.random.default_rng(20)
    stem = draw.integers(3, VOCAB_SIZE, size=30).tolist()
    requests = []
    for place in range(sum(BURSTS)):
        own = draw.integers(3, VOCAB_SIZE, size=int(draw.integers(1, 16))).tolist()
        params = SamplingParams(
            temperature=0.0,
            max_new_tokens=int(draw.integers(20, 49)),
            ignore_eos=True,
            frequency_penalty=0.5 if place % 7 == 0 else 0.0,
        )
        prompt = stem + own if place % 3 == 0 else own
        requests.append(GenerateRequest(prompt=prompt, rid=f"r{place}", sampling=params, logprobs=2))
    return requests


def _gaps(output: GenerateOutput) -> list[float]:
    assert output.logprobs is not None
    return [top[0][0] - top[1][0] for _, _, top in output.logprobs]


def engine_of(cell: Cell, world: World, capture: TapeCapture | None, **more: object) -> Engine:
    registry = Registry.discover(()).with_plugins(FIXED, distribution="fixed")
    with nullcontext() if capture is None else recorded("cpu", lambda device: capture):
        return Engine(compose(data=cell.config(world.path(cell.model), **more), env={}, registry=registry))


def drive(engine: Engine, requests: Sequence[GenerateRequest], seed: int) -> dict[str, list[int]]:
    """Have requests come in bursts of any size, some of them only to be aborted, and retract all that run now and then;
    return the tokens.
    """
    draw = np.random.default_rng(seed)
    waiting, running, bursts = list(requests), set[str](), draw.permutation(BURSTS).tolist()
    tokens: dict[str, list[int]] = {request.rid: [] for request in requests}
    aborted = itertools.count()
    while waiting or running:
        if waiting and len(running) <= draw.choice([0, 1, 3, 10, 50], p=[0.4, 0.2, 0.2, 0.1, 0.1]):
            for _ in range(bursts.pop()):
                running.add(engine.submit(waiting.pop()))
            endless = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
            gone = engine.submit(GenerateRequest(prompt=[5, 6, 7], rid=f"gone{next(aborted)}", sampling=endless))
            for _ in range(int(draw.integers(0, 6))):
                _read(engine, tokens, running)
            engine.abort(gone)
            _retract_all(engine)
        _read(engine, tokens, running)
    return tokens


def _retract_all(engine: Engine) -> None:
    controls = engine.built.scheduler.controls
    controls["pause_generation"]({"mode": "retract"})
    controls["continue_generation"]({})


def _read(engine: Engine, tokens: Mapping[str, list[int]], running: set[str]) -> None:
    for chunk in engine.poll():
        if chunk.rid in tokens:
            tokens[chunk.rid] += chunk.token_ids
        if chunk.finish_reason is not None:
            assert chunk.finish_reason["type"] == "length", chunk.finish_reason
            running.discard(chunk.rid)


def check(answers: Sequence[Answer], found: Mapping[str, list[int]], near: float) -> None:
    """Compare every answer, up to a near-tie."""
    compared = 0
    for answer in answers:
        rid, ours = answer.request.rid, found[answer.request.rid]
        assert len(ours) == len(answer.tokens), rid
        pairs = zip(ours, answer.tokens, strict=True)
        place = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
        if place is not None:
            gap = answer.gaps[place]
            assert gap < near, f"{rid}: token {place} is another, and was ahead by {gap:.4g}"
        compared += len(ours) if place is None else place
    total = sum(len(answer.tokens) for answer in answers)
    assert compared >= MIN_COMPARED * total, f"only {compared} of {total} tokens were compared"


def run_cell(cell: Cell, world: World) -> None:
    answers, capture = world.answers(cell), TapeCapture()
    with engine_of(cell, world, capture) as engine:
        most = engine.built.runner.ctx.max_new_tokens
        recorded = [size for size, below in zip(PREFILLS, (0, *PREFILLS), strict=False) if most is None or below < most]
        assert capture.captured == len(default_sizes(MOST)) + 2 * len(recorded)
        found = drive(
            engine,
            [answer.request for answer in answers],
            seed=SEEDS.index(cell._replace(model=cell.model.partition("-")[0])),
        )
        stats = engine.stats()
        attention = engine.built.runner.ctx.attention
        assert engine.built.scheduler.components.memory.idle_error() is None
    check(answers, found, NEAR_TIE[cell.kv])
    assert stats["book_errors"] == stats["failed_batches"] == stats["plugin_failures"] == 0
    figures = stats["runner"]
    steps = figures["replayed_steps"] + figures["eager_decode_steps"]
    prefills = figures["replayed_prefills"] + figures["eager_prefills"]
    assert capture.replayed == figures["replayed_steps"] + figures["replayed_prefills"]
    assert figures["replayed_steps"] >= MIN_REPLAYED * steps
    assert figures["replayed_prefills"] >= MIN_REPLAYED * prefills
    assert isinstance(attention, FixedExtends)
    used = {size for size, count in attention.fixed.items() if count}
    # Where decodes ride along with chunks of prompts, fewer steps are decodes alone.
    assert len(used) >= (6 if cell.mixed or cell.tokens == TIGHT else 9), f"only graphs of {sorted(used)} requests"
    sizes = [size for size, count in attention.extended.items() if count]
    assert len(sizes) >= (3 if most is None or most > PREFILLS[-2] else 1), f"only prefills of {sizes} tokens"
    assert stats["retractions"] >= len(BURSTS)


@pytest.mark.parametrize("cell", FEW, ids=str)
def test_few(cell: Cell, world: World) -> None:
    run_cell(cell, world)


@pytest.mark.full
@pytest.mark.parametrize("cell", REST, ids=str)
def test_every_pair_of_settings(cell: Cell, world: World) -> None:
    run_cell(cell, world)


def test_experts_are_part_of_graphs(world: World) -> None:
    """In torch, whose products of experts take their numbers of tokens from the device."""
    requests, found = make_requests()[:5], []
    for graphs in ("off", "on"):
        capture = TapeCapture()
        more = {"runner": {"use": "layered", "graphs": graphs, "graph_sizes": [4, 8], "prefill_graph_sizes": [128]}}
        with engine_of(EXPERTS, world, capture, **more) as engine:
            found.append([one.token_ids for one in engine.run([_shorter(one) for one in requests])])
            figures = engine.stats()["runner"]
    assert figures == {"replayed_steps": 7, "eager_decode_steps": 0, "replayed_prefills": 1, "eager_prefills": 0}
    assert found[0] == found[1]


@pytest.mark.full
@pytest.mark.parametrize("cell", [PLAIN, EXPERTS], ids=str)
def test_kernels_are_part_of_graphs(cell: Cell, world: World, interpreted_triton: None) -> None:
    """Attention in Triton, interpreted: slow, so few requests and small graphs."""
    requests, found = make_requests()[:5], []
    for graphs in ("off", "on"):
        capture = TapeCapture()
        more = {
            "attention": {"use": "triton"},
            "runner": {"use": "layered", "graphs": graphs, "graph_sizes": [1, 2, 4], "prefill_graph_sizes": [64, 128]},
        }
        with engine_of(cell, world, capture, **more) as engine:
            found.append([one.token_ids[:8] for one in engine.run([_shorter(one) for one in requests])])
            figures = engine.stats()["runner"]
        assert capture.replayed == figures.get("replayed_steps", 0) + figures.get("replayed_prefills", 0)
    expected = {"replayed_steps": 4, "eager_decode_steps": 3, "replayed_prefills": 1, "eager_prefills": 0}
    assert figures == expected, "with five requests there is no graph for it"
    assert found[0] == found[1]


def _shorter(request: GenerateRequest) -> GenerateRequest:
    length = 4 + int(request.rid[1:])
    params = msgspec.structs.replace(request.sampling, max_new_tokens=length)
    return msgspec.structs.replace(request, sampling=params)
