"""The card of a head: where it comes from, and what it gains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pegboard.core import __version__
from pegboard.tools.train_draft.evaluate import AcceptLength
from pegboard.tools.train_draft.settings import AnswerSettings, TrainSettings


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
    times = ", ".join(f"{name} {_duration(value)}" for name, value in seconds.items())
    products = "bfloat16" if facts.bf16 else "float32"
    kinds = f"{answering.greedy:.0%} greedy, the others at temperature {answering.temperature:g}"
    rows = [_row(f"{name}, by the engine", one) for name, one in measured.items()]
    rows.append(_row("a chain of 3, worked out from the model's states", facts.by_states))
    return f"""# EAGLE-3 draft head for {answering.model}

Made by `pegboard train-draft` (Pegboard {__version__}). It proposes tokens; the model verifies each of them, so its
answers stay what they are.

```yaml
speculation:
  use: eagle
  draft: <this directory>
  steps: 3
```

| what | |
|---|---|
| model | {answering.model} |
| data | {facts.answers} answers of the model itself with {facts.tokens} tokens ({kinds}); prompts {answering.prompts} |
| head | {facts.parameters / 1e6:.1f} M parameters, drafts {facts.draft_vocab} of the model's tokens |
| training | {facts.batches} batches of {training.batch_tokens} tokens, {training.epochs} epochs, test-time training \
of length {training.ttt}, AdamW at {training.learning_rate:g}, products in {products}, seed {training.seed} |
| time | {times} |
| command | `{command}` |

Accept length on {facts.held_out} held-out prompts, answered greedily with at most {answering.max_new_tokens} tokens:
tokens per verifying pass, the one included that the pass gives anyway. The columns are the shares of passes in which
the draft at that depth was accepted.

| drafts | accept length | depth 1 | depth 2 | depth 3 |
|---|---|---|---|---|
{chr(10).join(rows)}
"""


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"


def _row(name: str, one: AcceptLength) -> str:
    return f"| {name} | {one.length:.3f} | " + " | ".join(f"{share:.3f}" for share in one.by_depth) + " |"
