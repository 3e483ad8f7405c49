"""What ranks cost and gain: the bytes of a step on the wire, a sum over ranks, and tokens per second.

    python -m benchmarks.parallel --part wire      # bytes and time of decode steps as differences
    python -m benchmarks.parallel --part reduce    # all-reduce between two processes
    python -m benchmarks.parallel --part tensor    # one process with two threads against two ranks with one each
    python -m benchmarks.parallel --part pipeline  # the same with two sections of layers, with one lane and with two

All parts run on two cores. The last two draw a random model of about 0.3B in bfloat16, and show each process's memory:
`tensor` with the runner `layered` and with the native one.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.core.interfaces.batch import ModelWorkerBatch, TableChanges
from pegboard.core.interfaces.forward import ForwardMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from pegboard.plugins.parallel.api import Communicator

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096,
    "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
"""About 0.28 billion parameters."""


COMMUNICATORS = ["gloo", "shm"]


def wire() -> None:
    """Decode steps of 256 requests, whose memory is allocated for 16 tokens at once, as while it is plentiful."""
    from pegboard.plugins.parallel.delta import Decoder, Encoder
    from pegboard.plugins.parallel.part import Stamp

    rows, width, steps = 256, 16384, 256
    for prefix in (128, 8192):
        encoder, decoder = Encoder(rows + 1, width), Decoder(rows + 1, width, {})
        encoded, decoded, sizes = [], [], []
        for step in range(steps):
            work = decode_step(rows, width, prefix + step)
            started = time.perf_counter()
            data = encoder.batch(work, Stamp(step + 1, True))
            between = time.perf_counter()
            decoder.batch(data)
            encoded.append(between - started)
            decoded.append(time.perf_counter() - between)
            sizes.append(len(data))
        size = sum(sizes[1:]) / (steps - 1) / rows
        encode, decode = (1000 * float(np.median(seconds)) for seconds in (encoded, decoded))
        times = f"{encode:.3f} ms to encode, {decode:.3f} ms to read"
        print(f"context {prefix:5}: {size:.2f} bytes per request and step; {times}")


def decode_step(rows: int, width: int, prefix: int) -> ModelWorkerBatch:
    """Return a step of `rows` requests of equal length. Every 16th one begins new memory."""
    numbers = np.arange(rows, dtype=np.int64)
    lengths, slots = np.full(rows, prefix, np.int64), (numbers + 1) * width + prefix
    table = None
    if prefix % 16 == 0:
        offsets = np.arange(16)
        places = ((numbers + 1)[:, None] * width + prefix + offsets).reshape(-1)
        table = TableChanges(places, places.astype(np.int32))
    return ModelWorkerBatch(
        bid=prefix, forward_mode=ForwardMode.DECODE, input_ids=numbers + 7, positions=lengths, rows=numbers + 1,
        seq_lens=lengths + 1, extend_lens=numbers * 0 + 1, prefix_lens=lengths, out_cache_loc=slots,
        logits_indices=None, sampling=None, sampled_rows=numbers[:0], table=table,
    )  # fmt: skip


def reduce() -> None:
    """Sum float32 between two processes, by each communicator and within the native runner in turn, three times."""
    context = multiprocessing.get_context("spawn")
    for name in [*COMMUNICATORS, "native"] * 3:
        with tempfile.TemporaryDirectory() as meeting:
            other = context.Process(target=_reducing, args=(meeting, 1, name))
            other.start()
            _reducing(meeting, 0, name)
            other.join()


def _reducing(meeting: str, index: int, name: str) -> None:
    import torch

    from pegboard.core.interfaces.options import NoOptions
    from pegboard.plugins.parallel.api import CommunicatorContext
    from pegboard.plugins.parallel.gloo import Gloo
    from pegboard.plugins.parallel.shm import Shm

    torch.set_num_threads(1)
    made = (Gloo if name == "gloo" else Shm)(NoOptions(), CommunicatorContext(2, index, torch.device("cpu")))
    made.connect(Path(meeting), 60.0)
    add_up = native_sums(made, index) if name == "native" else made.all_reduce
    for size in (4096, 65536, 2**20):
        x, times = torch.zeros(size // 4), []
        for _ in range(2000 if size < 2**20 else 200):
            started = time.perf_counter()
            add_up(x)
            times.append(time.perf_counter() - started)
        if index == 0:
            low, middle, high = np.percentile(np.array(times) * 1e6, [10, 50, 90])
            print(f"{name:6} all-reduce of {size:8} bytes: {middle:.1f} us ({low:.1f} .. {high:.1f})")
    made.close()


def native_sums(made: Communicator, index: int) -> Callable[[Tensor], object]:
    """Return what adds up as the native runner does: rows of 1,024 numbers, at most 256."""
    from pegboard.plugins.cpu_native.library import Shape, first_that_loads
    from pegboard.plugins.cpu_native.share import Waiting
    from pegboard.toolkit.model.ranks import Ranks

    (_, library), ranks = first_that_loads("auto"), Ranks(2, index)
    ranks.connect(made)
    sizes = {"vocab": 64, "inter": 64, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 64}
    shape = Shape(hidden=1024, threads=1, ranks=2, rank=index, **sizes)
    handle, waiting = library.pb_create(ctypes.byref(shape)), Waiting(ranks)
    region = made.region(library.pb_ranks_bytes(handle))
    library.pb_join(handle, region.data_ptr(), waiting.lost)

    def add_up(x: Tensor, _kept: Tensor = region) -> None:
        if library.pb_sum(handle, x.data_ptr(), x.numel() // 1024):
            raise RuntimeError(f"the other process has ended: {waiting.error}")

    return add_up


def measured(
    title: str, threads: int, *, checkpoint: str = "", loop: str = "normal", chunk: int = 1024, **parallel: Any
) -> None:
    """Run one config in a process of its own, and print what it finds: with the native runner if there is a
    `checkpoint`.
    """
    settings: dict[str, object] = {"parallel": parallel, "scheduler": {"loop": loop, "chunked_prefill_size": chunk}}
    if checkpoint:
        model = {"path": checkpoint, "dtype": "bfloat16"}
        settings |= {"model": model, "runner": {"use": "cpu_native"}, "attention": {}}
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.parallel", "--run", json.dumps(settings)],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)}, stdout=subprocess.PIPE, check=True, text=True,
    )  # fmt: skip
    print(f"{title}: {found.stdout.splitlines()[-1]}", flush=True)


def run(settings: dict[str, Any]) -> None:
    """Print tokens per second of 1, 16 and 32 streams, prompt tokens per second, and the memory of each process."""
    import psutil

    from pegboard.core.config.compose import compose
    from pegboard.core.engine.engine import Engine

    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory))
        config = {
            "model": {"path": directory, "use": "dense", "load_format": "dummy", "dtype": "bfloat16",
                      "source": {"use": "hf", "needs_weights": False}},
            "runner": {"use": "layered"}, "attention": {"use": "torch"}, "memory": {"max_total_tokens": 16384},
            "log_level": "warning", **settings,
        }  # fmt: skip
        with Engine(compose(data=config, env={})) as engine:
            found = {f"{streams} streams, tokens/s": decoding(engine, streams) for streams in (1, 16, 32)}
            found["prompts, tokens/s"] = prefilling(engine)
            own = psutil.Process()
            sizes = [process.memory_full_info().uss / 2**20 for process in (own, *own.children())]
    print(json.dumps({**found, "MiB of each process": [round(size) for size in sizes]}))


def write_model(directory: Path, *, weights: bool = False) -> None:
    """Write config and tokenizer of `MODEL`, and random weights where they are wanted."""
    from pegboard.conformance.checkpoints import write_tiny_tokenizer

    (directory / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    write_tiny_tokenizer(directory)
    if weights:
        import torch
        from safetensors.torch import save_file

        from pegboard.plugins.cpu_native.weights import shapes
        from pegboard.toolkit.model.decoder_spec import DecoderSpec

        found = {
            name: torch.ones(shape, dtype=torch.bfloat16) if len(shape) == 1 else (0.02 * torch.randn(shape)).bfloat16()
            for name, shape in shapes(DecoderSpec.from_config(MODEL)).items()
        }
        save_file(found, directory / "model.safetensors", {"format": "pt"})


def decoding(engine: Any, streams: int, length: int = 48) -> float:
    params = {"temperature": 0, "ignore_eos": True}
    prompts = [[5 + number, 6, 7] for number in range(streams)]
    engine.generate(prompts, {**params, "max_new_tokens": 4})
    started = time.perf_counter()
    engine.generate(prompts, {**params, "max_new_tokens": length})
    return round(streams * length / (time.perf_counter() - started), 1)


def prefilling(engine: Any, length: int = 1024) -> float:
    prompt = np.random.default_rng(0).integers(5, 300, length).tolist()
    started = time.perf_counter()
    engine.generate([prompt], {"temperature": 0, "max_new_tokens": 1})
    return round(length / (time.perf_counter() - started), 1)


def tensor() -> None:
    measured("one process", 2)
    for name in COMMUNICATORS:
        measured(f"2 ranks, {name}", 1, tensor=2, communicator={"use": name})
    native()


def native() -> None:
    """Run both with the native runner, twice."""
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), weights=True)
        for _ in range(2):
            measured("native, one process", 2, checkpoint=directory)
            measured("native, 2 ranks", 1, checkpoint=directory, tensor=2)


def pipeline() -> None:
    """Two sections, the loop `overlap` with a lane for each, and prompts in chunks that follow each other."""
    for chunk in (1024, 128):
        measured(f"one process, chunks of {chunk}", 2, chunk=chunk)
        measured(f"2 sections, one lane, chunks of {chunk}", 1, chunk=chunk, pipeline=2)
        measured(f"2 sections, two lanes, chunks of {chunk}", 1, loop="overlap", chunk=chunk, pipeline=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"wire": wire, "reduce": reduce, "tensor": tensor, "pipeline": pipeline}
    parser.add_argument("--part", choices=[*parts], help="what to measure; all by default")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        run(json.loads(args.run))
        return
    for name, part in parts.items():
        if args.part in (None, name):
            part()


if __name__ == "__main__":
    main()
