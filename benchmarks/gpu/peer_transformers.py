"""A peer in the same run: transformers with a static cache, which compiles its decode and records it as CUDA graphs.

    python -m benchmarks.gpu.peer_transformers DIRECTORY [BATCH ...]

Prints the milliseconds of a decode step at about 1,024 tokens of context, from the difference of two lengths.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def seconds(model: Any, ids: torch.Tensor, count: int) -> float:
    """Return the seconds of generating `count` tokens."""
    if ids.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        cache_implementation="static",
        pad_token_id=0,
    )
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> None:
    """Time decode steps of several batches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("batches", nargs="*", type=int)
    given = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    context, short, long = (960, 16, 144) if device == "cuda" else (24, 2, 6)
    start = time.perf_counter()
    model: Any = AutoModelForCausalLM.from_pretrained(given.directory, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = model.to(device).eval()
    print(f"transformers: loaded in {time.perf_counter() - start:.1f} s", flush=True)
    with torch.inference_mode():
        for batch in given.batches or [1, 8, 64]:
            ids = torch.randint(300, 1000, (batch, context), device=device)
            warm = seconds(model, ids, long)  # compiles, for a cache of this length
            seconds(model, ids, short)
            found = [seconds(model, ids, long) - seconds(model, ids, short) for _ in range(3)]
            step = sorted(found)[1] / (long - short)
            print(
                f"transformers, static cache: batch {batch}: {1e3 * step:.2f} ms a step, {batch / step:.0f} tok/s "
                f"(first call {warm:.0f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
