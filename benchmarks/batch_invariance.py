"""What the batch changes: how many answers differ between a request that runs alone and the same one beside others, and
how many draws change when logits do a little.

    python -m benchmarks.batch_invariance [--model DIR] [--dtypes float32 bfloat16] [--answers 64] [--batch 32]

Prompts are parts of benchmarks/data/prose.txt of 8 to 100 tokens. Each is answered with a number of tokens, alone and
then with others at once: greedily, and with a seed of its own. `one number per row` is another way to draw with a seed,
for comparison: a uniform number is looked up in the cumulated probabilities, in the order of ids. On the way it says
how much the logits of an answer's first token differ between alone and batch (standard deviation), and which part of
the draws changes when normal noise of 0.02 is added to the logits.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from pegboard.core.config.compose import compose
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.plugin import Plugin, Provider
from pegboard.core.interfaces.sampling import SamplingBatch, SamplingParams
from pegboard.core.registry.registry import Registry
from pegboard.plugins.sampler_torch.sampler import TorchSampler
from pegboard.toolkit.sampling.noise import bits, keys

DEMO = "demo:smollm2-135m-instruct"
TEXT = Path(__file__).parent / "data" / "prose.txt"
NOISE = 0.02
KINDS: Mapping[str, Mapping[str, float]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0},
    "seeded, top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
}
ONE_NUMBER = "one number per row"


class OneNumberSampler(TorchSampler):
    """Draws by one number per row. Keeps the logits of first tokens by seed, and counts the draws that noise changes.

    The engine makes it, by name; one at a time, so its class has the figures.
    """

    first: ClassVar[dict[int, torch.Tensor]] = {}
    draws = 0
    changed = np.zeros(2, dtype=np.int64)
    """By one number per row, and by noise for each token id."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        cls = type(self)
        for row in (batch.steps == 0).nonzero().flatten().tolist():
            cls.first[int(batch.seeds[row])] = logits[row].clone()
        moved = logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(cls.draws)) * NOISE
        tokens = self._look_up(logits, batch)
        cls.draws += len(logits)
        cls.changed += [
            int((tokens != self._look_up(moved, batch)).sum()),
            int((super().sample(logits, batch) != super().sample(moved, batch)).sum()),
        ]
        return tokens

    def _look_up(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        cumulated = (logits / batch.temperatures[:, None]).softmax(-1).to(torch.float64).cumsum(-1)
        key = keys(batch.seeds, batch.steps)
        uniform = bits(key, torch.zeros(1)).squeeze(1).to(torch.float64) * 2.0**-32 + 0.5
        return (cumulated <= (uniform * cumulated[:, -1])[:, None]).sum(-1).clamp(max=logits.shape[1] - 1)


PLUGIN = Plugin(
    name="batch_invariance",
    version="0",
    providers=(
        Provider(
            "sampler", "one_number", factory=f"{__name__}:OneNumberSampler", summary="one number per row", rank=-1
        ),
    ),
)


def make_engine(model: str, dtype: str, batch: int, sampler: str) -> Engine:
    registry = Registry.discover().with_plugins(PLUGIN, distribution="pegboard", version="0")
    config = {
        "model": {"path": model, "dtype": dtype, "device": "cpu"},
        "prefix_cache": {"use": "none"},
        "sampler": {"use": sampler},
        "scheduler": {"max_running_requests": batch},
        "log_level": "error",
    }
    return Engine(compose(data=config, registry=registry))


def prompts(engine: Engine, count: int) -> list[list[int]]:
    """Return parts of the text, of 8 to 100 tokens."""
    ids, random = engine.tokenizer.encode(TEXT.read_text("utf-8")), np.random.default_rng(1)
    lengths = random.integers(8, 101, count)
    starts = random.integers(0, len(ids) - 101, count)
    return [list(ids[start : start + length]) for start, length in zip(starts, lengths, strict=True)]


def different(
    engine: Engine, asked: Sequence[list[int]], batch: int, tokens: int, sampling: Mapping[str, Any]
) -> tuple[float, float]:
    """Share of the answers that differ between alone and batch, and the logits' difference where they were kept."""
    requests = [
        GenerateRequest(
            prompt=prompt,
            sampling=SamplingParams(**sampling, seed=seed, max_new_tokens=tokens, ignore_eos=True),
        )
        for seed, prompt in enumerate(asked)
    ]
    alone = [engine.run([one])[0].token_ids for one in requests]
    logits = dict(OneNumberSampler.first)
    together = [
        output.token_ids
        for start in range(0, len(requests), batch)
        for output in engine.run(requests[start : start + batch])
    ]
    apart = [OneNumberSampler.first[seed] - one for seed, one in logits.items()]
    spread = float(torch.stack(apart).std()) if apart else 0.0
    return sum(a != b for a, b in zip(alone, together, strict=True)) / len(requests), spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=20)
    arguments = parser.parse_args()
    shape = (arguments.batch, arguments.tokens)
    for dtype in arguments.dtypes:
        with make_engine(arguments.model, dtype, arguments.batch, "auto") as engine:
            used = f"{engine.info.providers['runner'][0]} with sampler {engine.info.providers['sampler'][0]}"
            print(
                f"{dtype}, {used}: answers of {arguments.tokens} tokens that differ between alone and {arguments.batch}"
            )
            asked = prompts(engine, arguments.answers)
            for kind, sampling in KINDS.items():
                share, _ = different(engine, asked, *shape, sampling)
                print(f"  {kind:<24} {share:>6.1%}", flush=True)
        OneNumberSampler.first.clear()
        OneNumberSampler.draws, OneNumberSampler.changed = 0, np.zeros(2, dtype=np.int64)
        with make_engine(arguments.model, dtype, arguments.batch, "one_number") as engine:
            share, spread = different(engine, asked, *shape, KINDS["seeded"])
        print(f"  seeded, {ONE_NUMBER:<16} {share:>5.1%}")
        print(f"  logits of the first token differ by {spread:.4f}")
        old, new = OneNumberSampler.changed / OneNumberSampler.draws
        print(f"  draws that noise of {NOISE} in the logits changes, of {OneNumberSampler.draws}: {new:.1%}")
        print(f"  the same, {ONE_NUMBER}: {old:.1%}", flush=True)


if __name__ == "__main__":
    main()
