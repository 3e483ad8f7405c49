"""Decode speed in this process: output tokens per second at 1, 8 and 32 streams, 128 tokens in and 128 out.

    python benchmarks/decode.py [--streams 1 8 32] [--input 128] [--output 128] [--runs 3] [--config FILE] [--set
    KEY=VALUE]

Runs the whole pipeline (admission, batches, model, sampling, results) through `Engine`, greedy, on random prompts
that share nothing. Prints medians over the runs, and the share of the step that is not the forward pass. Other
programs on the machine move these figures: compare ratios within one run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.sampling import SamplingParams


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--config", default="examples/quickstart.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    return parser.parse_args()


def measure(engine: Engine, streams: int, n_in: int, n_out: int, rng: random.Random) -> dict[str, float]:
    """Measure one run: seconds to the first and to the last token, and where the time went."""
    vocab = engine.info.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(n_in)] for _ in range(streams)]
    sampling = SamplingParams(max_new_tokens=n_out, temperature=0.0, ignore_eos=True)
    engine.flush_cache()
    before = engine.stats()
    start = time.perf_counter()
    outputs = engine.generate(prompts, sampling)
    wall = time.perf_counter() - start
    after = engine.stats()
    assert all(len(output.token_ids) == n_out for output in outputs)
    forward = after["forward_time"] - before["forward_time"]
    steps = after["decode_steps"] - before["decode_steps"]
    return {
        "tok/s": streams * n_out / wall,
        "wall s": wall,
        "ms/step": 1000 * wall / max(1, steps),
        "overhead ms/step": 1000 * (wall - forward) / max(1, steps),
    }


def main() -> None:
    args = arguments()
    rng = random.Random(0)
    with Engine.from_config({}, args.config, overrides=args.overrides) as engine:
        print(f"{engine.info.served_name} {engine.info.dtype}, {args.input} in / {args.output} out, providers:")
        print(" ", ", ".join(f"{contract}={'+'.join(names)}" for contract, names in engine.info.providers.items()))
        measure(engine, 1, 8, 8, rng)
        print(f"{'streams':>8} {'tok/s':>9} {'ms/step':>9} {'overhead ms/step':>17}   medians of {args.runs}")
        for streams in args.streams:
            runs = [measure(engine, streams, args.input, args.output, rng) for _ in range(args.runs)]
            row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            print(f"{streams:>8} {row['tok/s']:>9.1f} {row['ms/step']:>9.1f} {row['overhead ms/step']:>17.2f}")


if __name__ == "__main__":
    main()
