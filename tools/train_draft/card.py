"""The card of a head: where it comes from, and what it gains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pegboard.core import __version__
from pegboard.tools.train_draft.evaluate import AcceptLength
from pegboard.tools.train_draft.settings import AnswerSettings, TrainSettings

_TEXT = """# EAGLE-3 draft head for {model}

Made by `pegboard train-draft` (Pegboard {version}). It proposes tokens; the model verifies each of them, so its answers
stay what they are.

```yaml
speculation:
  use: eagle
  draft: <this directory>
  steps: 3
```

| what | |
|---|---|
{about}

Accept length on {held_out} held-out prompts, answered greedily with at most {most} tokens: tokens per verifying pass,
the one included that the pass gives anyway. The columns are the shares of passes in which the draft at that depth was
accepted.

| drafts | accept length | depth 1 | depth 2 | depth 3 |
|---|---|---|---|---|
{rows}
"""


@dataclass(frozen=True, slots=True)
class Facts:
    """What came of a training."""

    answers: int
    tokens: int
    held_out: int
    draft_vocab: int
    parameters: int
    batches: int
    bf16: bool
    by_states: AcceptLength


def card(
    answering: AnswerSettings,
    training: TrainSettings,
    facts: Facts,
    measured: Mapping[str, AcceptLength],
    seconds: Mapping[str, float],
    command: str,
) -> str:
    """Return the text of README.md."""
    kinds = f"{answering.greedy:.0%} greedy, the others at temperature {answering.temperature:g}"
    about = {
        "model": answering.model,
        "data": f"{facts.answers} answers of the model itself with {facts.tokens} tokens ({kinds}); prompts "
        f"{answering.prompts}",
        "head": f"{facts.parameters / 1e6:.1f} M parameters, drafts {facts.draft_vocab} of the model's tokens",
        "training": f"{facts.batches} batches of {training.batch_tokens} tokens, {training.epochs} epochs, test-time "
        f"training of length {training.ttt}, AdamW at {training.learning_rate:g}, products in "
        f"{'bfloat16' if facts.bf16 else 'float32'}, seed {training.seed}",
        "time": ", ".join(f"{name} {_duration(value)}" for name, value in seconds.items()),
        "command": f"`{command}`",
    }
    rows = [_row(f"{name}, by the engine", one) for name, one in measured.items()]
    rows.append(_row("a chain of 3, worked out from the model's states", facts.by_states))
    return _TEXT.format(
        model=answering.model,
        version=__version__,
        about="\n".join(f"| {name} | {text} |" for name, text in about.items()),
        held_out=facts.held_out,
        most=answering.max_new_tokens,
        rows="\n".join(rows),
    )


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"


def _row(name: str, one: AcceptLength) -> str:
    return f"| {name} | {one.length:.3f} | " + " | ".join(f"{share:.3f}" for share in one.by_depth) + " |"
