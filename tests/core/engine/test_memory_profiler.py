"""KV gets what the largest steps leave, and never more."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.rig.model_references import model_checkpoint
from pegboard.core.engine.engine import Engine
from pegboard.core.engine.memory_profiler import SHORT, MemoryProfiler
from pegboard.core.interfaces.errors import OutOfMemory
from pegboard.core.interfaces.forward import ForwardBatch, ForwardMode, ForwardOutput
from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.core.interfaces.layers import LayerSpec
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampling import SamplingBatch
from pegboard.core.worker.device_parts import state_memory
from pegboard.plugins.memory_paged.pool import MHAPool
from pegboard.toolkit.device_queue import HostQueue
from pegboard.toolkit.model.room_for_kv import MARGIN, PER_GRAPH, PeakMemory, measure, pool_bytes, room_for_kv

GB = 2**30


@pytest.mark.parametrize(
    ("free", "needs", "left"),
    [
        (60 * GB, PeakMemory(0, 0), 60 * GB - int(MARGIN * 80 * GB)),
        (60 * GB, PeakMemory(4 * GB, 1 * GB), 56 * GB - int(MARGIN * 80 * GB)),
        (60 * GB, PeakMemory(4 * GB, 1 * GB, graphs=20), 55 * GB - int(MARGIN * 80 * GB) - 20 * PER_GRAPH),
        (60 * GB, PeakMemory(4 * GB, 1 * GB, 20, 2 * GB), 53 * GB - int(MARGIN * 80 * GB) - 20 * PER_GRAPH),
        (1 * GB, PeakMemory(4 * GB, 1 * GB), 0),
    ],
)
def test_what_is_left(free: int, needs: PeakMemory, left: int) -> None:
    assert pool_bytes(free, 80 * GB, needs) == left


class Meter:
    """A device of `size` bytes, of which weights take some; steps take more for as long as they run."""

    def __init__(self, size: int, weights: int) -> None:
        self.size, self.weights, self.scratch = size, weights, 0
        self.now = self.most = self.before = 0

    def total(self) -> int:
        return self.size

    def free(self) -> int:
        return self.size - self.weights - self.scratch

    def watch(self) -> None:
        self.before = self.most = self.now

    def peak(self) -> int:
        return self.most - self.before

    def take(self, nbytes: int) -> None:
        if self.weights + self.scratch + nbytes > self.size:
            raise torch.OutOfMemoryError("no memory")
        self.most = max(self.most, self.now + nbytes)


class Steps:
    def __init__(self, meter: Meter, prefills: list[int], decode: int, scratch: int) -> None:
        meter.scratch = scratch
        self.meter, self._prefills, self._decode = meter, prefills, decode

    def prefills(self) -> None:
        for nbytes in self._prefills:
            self.meter.take(nbytes)

    def decode(self) -> None:
        self.meter.take(self._decode)

    def prefill(self, tokens: int) -> None:
        self.meter.take(tokens)


def play(chance: random.Random) -> str:
    """Try a device and a model; check what comes of it, and return what did."""
    size = chance.randrange(1 * GB, 200 * GB)
    weights = int(size * chance.random() * 0.95)
    prefills = [int(size * chance.random() ** 4 * 0.5) for _ in range(2)]
    decode, scratch, graphs = int(size * chance.random() ** 4 * 0.3), size // 1000, chance.choice([0, 1, 30])
    tokens = int(size * chance.random() ** 4 * 0.3) if graphs else 0  # a byte each
    meter, worst = Meter(size, weights), max(*prefills, decode, tokens)

    def make() -> Steps:
        return Steps(meter, prefills, decode, scratch)

    if weights + scratch + worst > size:
        with pytest.raises(OutOfMemory, match=r"lower scheduler\.chunked_prefill_size or"):
            room_for_kv(meter, make, graphs, tokens)
        return "refused"
    room = room_for_kv(meter, make, graphs, tokens)
    captured = decode + tokens + graphs * PER_GRAPH if graphs else 0
    assert room == 0 or weights + room + worst + captured <= size * (1 - MARGIN) + 1
    return "served" if room else "nothing is left"


def test_steps_fit_beside_the_pool() -> None:
    """For a thousand devices and models: whatever ran in the trial runs beside the pool, and so do all graphs. Where
    the trial itself does not fit, the start fails with what to lower.
    """
    chance = random.Random(3)
    found = Counter(play(chance) for _ in range(1000))
    assert min(found["refused"], found["nothing is left"]) > 10
    assert found["served"] > 500


def test_each_peak_is_its_own() -> None:
    meter = Meter(100 * GB, 0)
    steps = Steps(meter, [3 * GB, 5 * GB], 2 * GB, 0)
    assert measure(meter, steps.prefills, steps.decode) == PeakMemory(5 * GB, 2 * GB)


def small_pool(layers: tuple[LayerSpec, ...], page_size: int, num_pages: int) -> MHAPool:
    return MHAPool(NoOptions(), KVPoolContext(num_pages, page_size, layers, torch.float32, torch.device("cpu")))


@pytest.mark.parametrize(("page_size", "windows"), [(1, False), (16, False), (16, True)])
def test_the_largest_steps_run(tmp_path: Path, page_size: int, windows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a real runner: a whole chunk of one prompt and of many, and a decode of all, each with logprobs; also where
    layers are in two KV groups.
    """
    model = tiny_checkpoint(tmp_path, "mistral", num_hidden_layers=1, sliding_window=8)
    config = {
        "attention": {"use": "torch"},
        "runner": {"use": "layered"},
        "memory": {"max_total_tokens": 64, "page_size": 16, "window_pages": windows},
        "model": {"path": str(model), "dtype": "float32"},
    }
    with Engine.from_config(config) as engine:
        runner, seen = engine.built.runner, []
        assert len(runner.ctx.spec.kv_groups) == 1 + windows

        scratch = partial(small_pool, runner.ctx.spec.layers, page_size)
        execute = runner.execute

        def noted(batch: ForwardBatch, sampling: SamplingBatch | None) -> ForwardOutput:
            seen.append((batch.forward_mode, batch.batch_size, batch.num_tokens))
            output = execute(batch, sampling)
            assert output.logprobs is not None
            return output

        monkeypatch.setattr(runner, "execute", noted)
        trial = MemoryProfiler(runner, scratch, HostQueue(), page_size, running=7, chunk=40, max_context_len=64)
        trial.prefills()
        trial.decode()
        short = [(ForwardMode.EXTEND, 2, 1 + length) for length in SHORT]
        assert seen == [(ForwardMode.EXTEND, 1, 40), (ForwardMode.EXTEND, 7, 40), *short, (ForwardMode.DECODE, 7, 7)]


def test_states_are_in_the_slot_of_padding(tmp_path: Path) -> None:
    """The largest steps of a model whose layers keep states: they begin in prefills, and no request's slot is written
    to.
    """
    model = model_checkpoint(tmp_path, "bamba")
    config = {
        "attention": {"use": "torch"},
        "runner": {"use": "layered"},
        "memory": {"max_total_tokens": 64, "page_size": 16},
        "model": {"path": str(model), "dtype": "float32"},
        "plugins": {"recurrent_states": {"slots": 5}},
    }
    with Engine.from_config(config) as engine:
        runner, memory = engine.built.runner, state_memory(list(engine.built.worker.parts.by_name.values()))
        assert memory is not None
        with torch.inference_mode():
            for state in memory.values():
                state.fill_(torch.nan)
        scratch = partial(small_pool, runner.ctx.spec.layers, 16)
        trial = MemoryProfiler(runner, scratch, HostQueue(), 16, 7, 40, 64, memory)
        trial.prefills()
        assert all(bool(state[0].isfinite().all()) for state in memory.values())
        trial.decode()
        assert all(bool(state[1:].isnan().all()) for state in memory.values())
