"""Pegboard's engine in this process, one stream. Prints one line of JSON.

    python in_process_ours.py MODEL_DIRECTORY INPUT OUTPUT PREFILL [KEY=VALUE ...]

Times the whole pipeline: admission, scheduling, sampling and detokenising, beside the model.
"""

from __future__ import annotations

import json
import random
import sys
import time

from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.errors import PegboardError
from pegboard.core.interfaces.sampling import SamplingParams


def main() -> None:
    n_in, n_out, n_prefill = (int(one) for one in sys.argv[2:5])
    overrides = sys.argv[5:]
    draw = random.Random(0)
    began = time.perf_counter()
    data = {"model": {"path": sys.argv[1]}, "memory": {"max_total_tokens": 4096}, "log_level": "error"}
    with Engine.from_config(data, overrides=overrides) as engine:

        def run(n_in: int, n_out: int) -> tuple[float, float]:
            """Return seconds to the first token, and to the last one."""
            ids = [draw.randrange(1000, 10_000) for _ in range(n_in)]
            sampling = SamplingParams(temperature=0.0, max_new_tokens=n_out, ignore_eos=True)
            first, start = 0.0, time.perf_counter()
            for _ in engine.stream(ids, sampling):
                first = first or time.perf_counter() - start
            return first, time.perf_counter() - start

        run(n_in, 2)
        found = {"load_s": time.perf_counter() - began, "prefill": n_prefill / run(n_prefill, 1)[1]}
        first, whole = run(n_in, n_out)
        found["decode"] = (n_out - 1) / (whole - first)
        found["whole"] = n_out / whole
        found["providers"] = engine.info.providers["runner"]
    print(json.dumps(found))


if __name__ == "__main__":
    try:
        main()
    except PegboardError as error:
        sys.exit(str(error))
