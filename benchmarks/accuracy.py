"""How near answers are to transformers': teacher-forced agreement, and the perplexity of a fixed text.

    python -m benchmarks.accuracy [--model DIR] [--part agreement perplexity] [--set KEY=VALUE ...] [--json FILE]
        [--text FILE ...]

Runs on the CPU, in bfloat16 unless --set says otherwise. The measure is bf16's own noise: transformers in float32 is
taken as the truth, and how far transformers in bf16 is from it is how far one may be. Ends with 1 where a limit is
exceeded. `--set runner.use=layered` measures another runner, and what eight bits cost is said by
`--set runner.use=cpu_native --set runner.weights=int8`.

Agreement: prompts out of the text, answers drawn greedily by the engine, so that every token behind the prompt comes
from a decode step, at 1 and at 32 streams; transformers is fed the same tokens. A token that it would
not have chosen is a mismatch; bf16 has three digits, so near ties may go either way.

Perplexity: of benchmarks/data/prose.txt, by the engine's logprobs of prompts, in chunks of 512 tokens. `--text` takes
files in its place, the first 6,000 tokens of them; such figures can be compared within one run only.

With `--set memory.kv_dtype=fp8_e4m3`, or another type of 8 bits, the same perplexity is measured over KV in bfloat16 as
well, by the same runner, and what counts is the difference: at most 1%. Agreement is not asked for then, since its
measure is bf16's own noise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import PegboardError
from pegboard.core.interfaces.sampling import SamplingParams

if TYPE_CHECKING:
    import torch

DEMO = "demo:smollm2-135m-instruct"
TEXT = Path(__file__).parent / "data" / "prose.txt"
TEXT_SHA256 = "bc2d08cd140437148a540c8a1647f4bedee7a26da923169f07f59c91d12c06be"
"""The text is part of the measure: figures of another one cannot be compared."""
PERPLEXITY_LIMIT = 0.005
KV_LIMIT = 0.01
"""By how much KV in 8 bits may raise the perplexity, relative."""
MARGIN_LIMIT = 0.125
"""Of logits: a mismatch with a larger margin is not a near tie. Logits of 16 to 32 are an eighth apart in bf16."""
MISMATCH_LIMIT = 3 / 64
CHUNK = 512
MOST_TOKENS = 6000
ROWS = 256
"""Of logits that are worked on at once: all of them in float32 would take half a gigabyte."""


@dataclass(frozen=True)
class Agreement:
    """How near `tokens` answer tokens are to transformers in float32, and how near transformers in bf16 is.

    Errors are root mean squares over the tokens' logprobs. A mismatch is a token that float32 would not have chosen;
    its margin is the difference of the two logits in float32, and the largest one counts.
    """

    streams: int
    tokens: int
    error: float
    bf16_error: float
    """Of transformers in bf16."""
    mismatches: int
    bf16_mismatches: int
    margin: float
    bf16_margin: float
    apart: int
    """Tokens that transformers in bf16 would not have chosen: both noises together."""

    @property
    def ok(self) -> bool:
        """As near as bf16 itself is; with some slack, for few tokens are looked at, and one of them has the margin."""
        return (
            self.error <= 1.1 * self.bf16_error
            and self.mismatches <= max(MISMATCH_LIMIT * self.tokens, self.bf16_mismatches)
            and self.apart <= max(MISMATCH_LIMIT * self.tokens, 2 * self.bf16_mismatches)
            and self.margin <= max(MARGIN_LIMIT, 1.5 * self.bf16_margin)
        )


@dataclass(frozen=True)
class Perplexity:
    """Of `tokens` tokens: the engine's, and those of transformers."""

    tokens: int
    ours: float
    float32: float
    bfloat16: float

    @property
    def differences(self) -> tuple[float, float]:
        """Ours against float32 and against bfloat16, relative."""
        return self.ours / self.float32 - 1, self.ours / self.bfloat16 - 1

    @property
    def ok(self) -> bool:
        return all(abs(one) <= PERPLEXITY_LIMIT for one in self.differences)


@dataclass(frozen=True)
class KVPrecision:
    """The perplexity over KV that is kept in `dtype`, and over KV in bfloat16; bytes that a token takes in either."""

    dtype: str
    ours: float
    bfloat16: float
    bytes: int
    bfloat16_bytes: int

    @property
    def difference(self) -> float:
        """How much higher it is, relative."""
        return self.ours / self.bfloat16 - 1

    @property
    def ok(self) -> bool:
        return self.difference <= KV_LIMIT and 2 * self.bytes == self.bfloat16_bytes


def text(files: Sequence[Path] = ()) -> str:
    """Return what files say, or the fixed text. Raises PegboardError where that is another one, and OSError."""
    if files:
        return "\n".join(file.read_text("utf-8") for file in files)
    data = TEXT.read_bytes()
    if hashlib.sha256(data).hexdigest() != TEXT_SHA256:
        raise PegboardError(f"{TEXT} was changed; figures of another text cannot be compared")
    return data.decode("utf-8")


def directory_of(model: str) -> Path:
    """Return where transformers finds it."""
    if model != DEMO:
        return Path(model)
    from pegboard.plugins.model_sources.demo import find_demo
    from pegboard.plugins.model_sources.gguf.convert import convert_gguf
    from pegboard.toolkit.system.cache_dir import default_cache_dir

    return convert_gguf(find_demo(DEMO.removeprefix("demo:")), default_cache_dir())


class Reference:
    """transformers on the same tokens, in float32 or bfloat16."""

    def __init__(self, directory: Path, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()

    def logits(self, ids: Sequence[int], start: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
        """Behind each token from `start` on but the last: (position of the first row, float32 [rows, vocabulary])."""
        import torch

        with torch.inference_mode():
            hidden = self._model.model(torch.tensor([list(ids)])).last_hidden_state[0]
            for first in range(start, len(ids) - 1, ROWS):
                yield first, self._model.lm_head(hidden[first : min(first + ROWS, len(ids) - 1)]).float()


def agreement(
    engine: Engine, prompts: Sequence[list[int]], answer: int, exact: Reference, bf16: Reference
) -> Agreement:
    """Compare answers to all prompts at once, of `answer` tokens each, against transformers."""
    import torch

    sampling = SamplingParams(temperature=0.0, max_new_tokens=answer, ignore_eos=True)
    answers = engine.run([GenerateRequest(prompt=one, sampling=sampling, logprobs=0) for one in prompts])
    parts: list[tuple[torch.Tensor, ...]] = []
    for prompt, out in zip(prompts, answers, strict=True):
        start, ids = len(prompt) - 1, torch.tensor(out.token_ids)
        found = torch.tensor([value for value, _, _ in out.logprobs or []])
        true, rough = (
            torch.cat([rows for _, rows in one.logits([*prompt, *out.token_ids], start)]) for one in (exact, bf16)
        )
        said = _of(true.log_softmax(-1), ids)
        best, other = true.max(-1), rough.argmax(-1)
        errors = found - said, _of(rough.log_softmax(-1), ids) - said
        margins = best.values - _of(true, ids), best.values - _of(true, other)
        # A tie in float32 itself is not a mismatch, so differences count and not ids.
        parts.append((*errors, *margins, (other != ids).float()))
    ours, theirs, margin, bf16_margin, apart = (torch.cat(column) for column in zip(*parts, strict=True))
    return Agreement(
        streams=len(prompts),
        tokens=len(ours),
        error=float(ours.square().mean().sqrt()),
        bf16_error=float(theirs.square().mean().sqrt()),
        mismatches=int((margin > 0).sum()),
        bf16_mismatches=int((bf16_margin > 0).sum()),
        margin=float(margin.max()),
        bf16_margin=float(bf16_margin.max()),
        apart=int(apart.sum()),
    )


def _of(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the entry of each row that `ids` says."""
    return table.gather(1, ids[:, None]).squeeze(1)


def perplexity(engine: Engine, ids: list[int], exact: Reference, bf16: Reference) -> Perplexity:
    """Of these tokens behind the first one."""
    return Perplexity(len(ids) - 1, own_perplexity(engine, ids), _perplexity(exact, ids), _perplexity(bf16, ids))


def own_perplexity(engine: Engine, ids: list[int]) -> float:
    """Return the engine's, of these tokens behind the first one."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=1)
    (out,) = engine.run([GenerateRequest(prompt=ids, sampling=sampling, logprobs=0, logprob_start=0)])
    values = [value for value, _, _ in (out.input_logprobs or [])[1:] if value is not None]
    if len(values) != len(ids) - 1:
        raise PegboardError(f"{len(ids)} tokens were asked for, logprobs came for {len(values)}")
    return math.exp(-math.fsum(values) / len(values))


def kv_precision(model: str, engine: Engine, ids: list[int], overrides: Sequence[str]) -> KVPrecision:
    """Compare an engine that keeps KV in 8 bits with one that keeps it in bfloat16."""
    (runner,) = engine.info.providers["runner"]
    plain = [*overrides, "memory.kv_dtype=bfloat16", f"runner.use={runner}"]
    ours, nbytes = own_perplexity(engine, ids), _bytes_per_token(engine)
    with Engine.from_config(config(model, len(ids) + CHUNK), overrides=plain) as other:
        dtype = engine.resolved.engine.memory.kv_dtype
        return KVPrecision(dtype, ours, own_perplexity(other, ids), nbytes, _bytes_per_token(other))


def _bytes_per_token(engine: Engine) -> int:
    pool = engine.built.pool
    return pool.nbytes // pool.num_slots


def _perplexity(reference: Reference, ids: Sequence[int]) -> float:
    import torch

    total, targets = 0.0, torch.tensor(list(ids))
    for first, rows in reference.logits(ids):
        here = targets[first + 1 : first + 1 + len(rows), None]
        total -= float(rows.log_softmax(-1).gather(1, here).double().sum())
    return math.exp(total / (len(ids) - 1))


def config(model: str, tokens: int) -> dict[str, Any]:
    return {
        "model": {"path": model, "dtype": "bfloat16", "device": "cpu"},
        "memory": {"max_total_tokens": tokens},
        "scheduler": {"chunked_prefill_size": CHUNK},
        "log_level": "error",
    }


def windows(ids: Sequence[int], count: int, length: int) -> list[list[int]]:
    """Pieces of the text, evenly spread."""
    step = max(1, (len(ids) - length) // max(1, count))
    return [list(ids[i * step : i * step + length]) for i in range(count)]


def measure(model: str, parts: Sequence[str], overrides: Sequence[str], files: Sequence[Path] = ()) -> dict[str, Any]:
    """Measure both parts, as far as they are asked for, and what computed."""
    directory = directory_of(model)
    with Engine.from_config(config(model, 16384), overrides=overrides) as engine:
        ids = engine.tokenizer.encode(text(files))[:MOST_TOKENS]
        found: dict[str, Any] = {"model": model, "set": list(overrides), "runner": engine.info.providers["runner"]}
        if engine.resolved.engine.memory.kv_dtype.startswith("fp8"):
            return found | {"kv": _with_ok(kv_precision(model, engine, ids, overrides))}
        exact, bf16 = Reference(directory, "float32"), Reference(directory, "bfloat16")
        if "agreement" in parts:
            found["agreement"] = [
                _with_ok(agreement(engine, windows(ids, streams, 64), answer, exact, bf16))
                for streams, answer in ((1, 128), (32, 32))
            ]
        if "perplexity" in parts:
            found["perplexity"] = _with_ok(perplexity(engine, ids, exact, bf16))
    return found


def _with_ok(one: Agreement | Perplexity | KVPrecision) -> dict[str, Any]:
    more: dict[str, Any] = {"differences": one.differences} if isinstance(one, Perplexity) else {}
    if isinstance(one, KVPrecision):
        more = {"difference": one.difference}
    return {**asdict(one), **more, "ok": one.ok}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield what is printed."""
    yield f"{found['model']}, runner {'+'.join(found['runner'])}, {' '.join(found['set']) or 'no settings'}"
    for one in found.get("agreement", []):
        yield (
            f"agreement, {one['streams']} streams, {one['tokens']} tokens, against float32 (in brackets: transformers' "
            f"bf16): error of logprobs {one['error']:.4f} ({one['bf16_error']:.4f}), mismatches {one['mismatches']} "
            f"({one['bf16_mismatches']}), largest margin {one['margin']:.3f} ({one['bf16_margin']:.3f}); apart from "
            f"transformers in bf16: {one['apart']}: {_said(one)}"
        )
    if one := found.get("perplexity"):
        a, b = one["differences"]
        yield (
            f"perplexity of {one['tokens']} tokens: {one['ours']:.4f}; transformers in float32 {one['float32']:.4f} "
            f"({a:+.3%}), in bf16 {one['bfloat16']:.4f} ({b:+.3%}): {_said(one)}"
        )

    if one := found.get("kv"):
        yield (
            f"perplexity over KV in {one['dtype']}: {one['ours']:.4f}, in bfloat16: {one['bfloat16']:.4f} "
            f"({one['difference']:+.3%}); bytes per token: {one['bytes']}, in bfloat16: {one['bfloat16_bytes']}: "
            f"{_said(one)}"
        )


def _said(one: dict[str, Any]) -> str:
    return "within the limits" if one["ok"] else "OUTSIDE the limits"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO, help="a Hugging Face directory; by default the demo model")
    parser.add_argument("--part", nargs="+", choices=("agreement", "perplexity"), default=["agreement", "perplexity"])
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--text", nargs="+", type=Path, default=[], metavar="FILE", help="other text, of these files")
    args = parser.parse_args()
    try:
        found = measure(args.model, args.part, args.overrides, args.text)
    except (PegboardError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines(found)))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    fine = {"ok": True}
    judged = (*found.get("agreement", []), found.get("perplexity", fine), found.get("kv", fine))
    return 0 if all(one["ok"] for one in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
