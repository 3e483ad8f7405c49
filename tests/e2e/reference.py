"""What transformers answers, and how an engine's answers are compared with it.

Greedy decoding is only as reproducible as the gap between the two largest logits: where it is tiny, the order of
sums decides. So an answer may leave the reference there, and nowhere else; from there on the two have different
texts, and the comparison of that prompt ends. How many positions were compared has to be counted, or all of this
would prove nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pegboard.conformance.rig.paged import PagedRun

if TYPE_CHECKING:
    from pegboard.core.engine.engine import Engine
    from pegboard.core.interfaces.tokenizer import Tokenizer

PROMPTS = Path(__file__).parents[1] / "data" / "prompts.json"

NEAR_TIE = 1e-3
"""Difference of the reference's two largest logits below which either token is right."""

MIN_COMPARED = 0.9
"""Share of all positions that must have been compared before the first near-tie."""

LOGITS_TOLERANCE = 1e-4
"""Largest difference of a position's logits over their largest magnitude: float32, summed in another order."""


@dataclass(frozen=True)
class Answer:
    """A greedy answer: per token its id, how far the runner-up was behind (in logits), and its log probability."""

    tokens: list[int]
    gaps: list[float]
    logprobs: list[float]


class Reference:
    """Answers of a checkpoint in transformers, float32, with its own eager attention, one prompt at a time."""

    def __init__(self, directory: Path, cache_dir: Path) -> None:
        self.directory = directory
        self._cache_dir = cache_dir

    def answers(self, prompts: Sequence[Sequence[int]], length: int) -> list[Answer]:
        """`length` tokens for each prompt, end of text or not. Kept in a file, by the content of all that they
        depend on.
        """
        return [self._answer(list(prompt), length) for prompt in prompts]

    def logits(self, tokens: Sequence[int], last: int) -> torch.Tensor:
        """Logits float32 [last, vocab] of the last positions of a text."""
        with torch.inference_mode():
            output = self._model(torch.tensor([list(tokens)]), use_cache=False, logits_to_keep=last)
        logits: torch.Tensor = output.logits[0]
        return logits

    def _answer(self, prompt: list[int], length: int) -> Answer:
        import transformers

        identity = [_fingerprint(self.directory), prompt, length, transformers.__version__, torch.__version__]
        file = self._cache_dir / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]}.json"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            scratch = file.with_suffix(f".{os.getpid()}")
            scratch.write_text(json.dumps(asdict(self._compute(prompt, length))), encoding="utf-8")
            scratch.replace(file)
        return Answer(**json.loads(file.read_text("utf-8")))

    @torch.inference_mode()
    def _compute(self, prompt: list[int], length: int) -> Answer:
        from transformers import DynamicCache

        answer = Answer([], [], [])
        cache, new = DynamicCache(config=self._model.config), prompt
        for _ in range(length):
            output = self._model(torch.tensor([new]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits = output.logits[0, -1].double()
            best = logits.topk(2)
            token = int(best.indices[0])
            answer.tokens.append(token)
            answer.gaps.append(float(best.values[0] - best.values[1]))
            answer.logprobs.append(float(logits.log_softmax(-1)[token]))
            new = [token]
        return answer

    @property
    def _model(self) -> Any:
        return _load(self.directory)


@lru_cache(maxsize=1)
def _load(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


@lru_cache(maxsize=64)
def _fingerprint(directory: Path) -> str:
    """Digest of a checkpoint's config and weights."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def prompt_ids(tokenizer: Tokenizer, names: Sequence[str] | None = None) -> list[list[int]]:
    """The prompts of the data file as token ids, raw text and conversations; all, or those named."""
    entries = {entry["name"]: entry for entry in json.loads(PROMPTS.read_text("utf-8"))}
    found = []
    for name in names if names is not None else entries:
        entry = entries[name]
        if "messages" in entry:
            text = tokenizer.apply_chat_template(entry["messages"])
            found.append(tokenizer.encode(text, add_special_tokens=False))
        else:
            found.append(tokenizer.encode(entry["text"]))
    return found


@dataclass
class Comparison:
    """Counts positions over many answers, and fails at the first that is wrong."""

    compared: int = 0
    total: int = 0
    near_ties: int = 0

    def add(self, found: Sequence[int], expected: Answer, what: str) -> int:
        """Compare one answer. Returns how many positions agree before it may differ; fails where it may not."""
        self.total += len(expected.tokens)
        assert len(found) == len(expected.tokens), f"{what}: {len(found)} tokens instead of {len(expected.tokens)}"
        for position, (ours, theirs, gap) in enumerate(zip(found, expected.tokens, expected.gaps, strict=True)):
            if ours != theirs:
                assert gap < NEAR_TIE, (
                    f"{what}: token {position} is {ours}, transformers says {theirs}, and its two largest logits are "
                    f"{gap:.4g} apart"
                )
                self.near_ties += 1
                self.compared += position
                return position
        self.compared += len(expected.tokens)
        return len(expected.tokens)

    def finish(self) -> None:
        """Fail unless enough was compared."""
        assert self.compared >= MIN_COMPARED * self.total, (
            f"only {self.compared} of {self.total} positions were compared, after {self.near_ties} near-ties"
        )


def forced_logits(engine: Engine, tokens: Sequence[int], last: int, *, chunk: int = 512) -> torch.Tensor:
    """Logits [last, vocab] of the last positions of a text, by the engine's own network and attention, in chunks."""
    ctx = engine.built.runner.ctx
    assert ctx.network is not None
    run = PagedRun(
        ctx.network,
        ctx.spec,
        attention=ctx.attention,
        page_size=engine.resolved.engine.memory.page_size,
        requests=1,
        length=len(tokens),
    )
    parts = []
    with torch.inference_mode():
        for start in range(0, len(tokens), chunk):
            batch = run.batch({0: list(tokens[start : start + chunk])})
            run.attention.prepare(batch)
            hidden = run.network.forward(batch)
            wanted = min(hidden.shape[0], max(0, start + hidden.shape[0] - (len(tokens) - last)))
            if wanted:
                parts.append(run.network.logits(hidden[-wanted:]))
    return torch.cat(parts)


def assert_logits_agree(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Within `LOGITS_TOLERANCE` at every position."""
    assert found.shape == expected.shape
    error = ((found - expected).abs().amax(-1) / expected.abs().amax(-1)).max()
    assert float(error) <= LOGITS_TOLERANCE, f"{what}: logits are off by {float(error):.3g} relative"
