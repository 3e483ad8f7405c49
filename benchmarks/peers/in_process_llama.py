"""llama.cpp in this process, one stream: run by the Python of its own environment. Prints one line of JSON.

    python in_process_llama.py MODEL.gguf THREADS INPUT OUTPUT PREFILL

The model alone is timed, by llama.cpp's own calls: no text, no sampler but the largest logit. So its figures are the
best that a server around it could reach.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

import llama_cpp  # type: ignore[import-not-found]
import numpy as np


def main() -> None:
    path = sys.argv[1]
    threads, n_in, n_out, n_prefill = (int(one) for one in sys.argv[2:6])
    # Messages about every tensor are not wanted, errors are (level 4; 5 is a message that goes on).
    quiet = llama_cpp.llama_log_callback(
        lambda level, text, data: print(text.decode(errors="replace"), end="", file=sys.stderr) if level == 4 else None
    )
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    began = time.perf_counter()
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    if not model:
        sys.exit(f"llama.cpp cannot load {path}")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = n_prefill + n_in + n_out + 64
    params.n_batch = params.n_ubatch = max(n_in, n_prefill)
    params.n_threads = params.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        sys.exit(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    random = np.random.default_rng(0)

    def feed(ids: list[int]) -> int:
        """Return one forward pass; the likeliest token behind it."""
        array = (llama_cpp.llama_token * len(ids))(*ids)
        if code := llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(ids))):
            sys.exit(f"llama_decode: {code}")
        logits = llama_cpp.llama_get_logits_ith(context, -1)
        return int(np.argmax(np.ctypeslib.as_array(logits, shape=(vocabulary,))))

    def prompt(count: int) -> list[int]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        ids: list[int] = random.integers(1000, 10_000, count).tolist()
        return ids

    feed(prompt(n_in))
    found: dict[str, float] = {"load_s": time.perf_counter() - began}
    ids = prompt(n_prefill)
    start = time.perf_counter()
    feed(ids)
    found["prefill"] = n_prefill / (time.perf_counter() - start)
    ids = prompt(n_in)
    start = time.perf_counter()
    token = feed(ids)
    first = time.perf_counter()
    for _ in range(n_out - 1):
        token = feed([token])
    end = time.perf_counter()
    found["decode"] = (n_out - 1) / (end - first)
    found["whole"] = n_out / (end - start)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
