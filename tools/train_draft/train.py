"""Training: one batch after another, with all that it takes to go on after a kill."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from pegboard.core.interfaces.errors import PegboardError
from pegboard.tools.train_draft.answers import Stopped
from pegboard.tools.train_draft.data import StoredStates, Vocabulary, save_tensors
from pegboard.tools.train_draft.draft import Draft, Pack
from pegboard.tools.train_draft.progress import Watcher
from pegboard.tools.train_draft.settings import LOSS_DECAY, WARM_UP, TrainSettings
from pegboard.tools.train_draft.states import SequenceStates

SAVE_EVERY = 120.0
"""Seconds between two checkpoints. When they are taken does not change what is trained."""
_GONE = 0.98
"""How fast what is told of the training forgets."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences with what the head should say: for each of the packed entries `rows` int64 [n], which is at `places`
    int64 [n] of its sequence, the draft ids `tops` int64 [n, tops] of the model's likeliest next tokens and their
    probabilities `shares` float32, 0 for those that cannot be drafted.
    """

    pack: Pack
    rows: Tensor
    places: Tensor
    tops: Tensor
    shares: Tensor


class Batches:
    """Makes batches of sequences. `ids` int64 [n] in ascending order have the `embeddings` [n, hidden]."""

    def __init__(self, ids: Tensor, embeddings: Tensor, vocabulary: Vocabulary) -> None:
        self._ids = ids
        self._embeddings = embeddings
        self._draft_ids = vocabulary.draft_ids()

    def make(self, sequences: Sequence[SequenceStates]) -> Batch:
        """Return a batch. Entry i of a sequence predicts token i + 2; those that predict a prompt's tokens are there to
        be seen, and are no rows.
        """
        lengths = tuple(one.entries for one in sequences)
        tokens = torch.cat([one.ids[1:-1] for one in sequences])
        embeddings = self._embeddings[torch.searchsorted(self._ids, tokens)].float()
        states = torch.cat([one.taps[:-2] for one in sequences]).float()
        rows, places, tops, shares = [], [], [], []
        start = 0
        for one in sequences:
            # Row r is about the successor of token prompt - 1 + r, which entry prompt - 2 + r predicts.
            first = max(0, 2 - one.prompt)
            here = torch.arange(max(0, one.prompt - 2), one.entries)
            rows.append(start + here)
            places.append(here)
            tops.append(one.tops[first:])
            shares.append(one.shares[first:])
            start += one.entries
        drafts = self._draft_ids[torch.cat(tops).long()]
        return Batch(
            Pack(embeddings, states, lengths),
            torch.cat(rows),
            torch.cat(places),
            drafts.clamp(min=0),
            torch.cat(shares) * (drafts >= 0),
        )


class _SoftCrossEntropy(torch.autograd.Function):
    """Sum over rows of -sum(share * log softmax(logits)[top]), with its gradient found on the way."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tops: Tensor, shares: Tensor) -> Tensor:
        mass = shares.sum(-1, keepdim=True)
        norm = logits.logsumexp(-1, keepdim=True)
        loss = (mass * norm).sum() - (shares * logits.gather(1, tops)).sum()
        gradient = (logits - norm).exp_().mul_(mass)
        ctx.save_for_backward(gradient.scatter_add_(1, tops, -shares))
        return loss

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * above[0], None, None


def batch_loss(draft: Draft, batch: Batch, steps: int) -> tuple[Tensor, list[float]]:
    """Return the loss of a batch over `steps` steps of test-time training, and for each step the share of rows where
    the head's likeliest token is the model's.

    A step's loss is the mean over its rows of the cross-entropy with the model's distribution, as far as that falls on
    its likeliest tokens and on the draft vocabulary: a position counts as much as can be drafted there. Steps weigh
    LOSS_DECAY to the power of their number, and 1 together.
    """
    total = torch.zeros(())
    hits: list[float] = []
    weights = [LOSS_DECAY**step for step in range(steps)]
    for step, states in enumerate(draft.steps(batch.pack, steps)):
        kept = batch.places >= step
        tops, shares = batch.tops[kept], batch.shares[kept]
        logits = draft.logits(states[batch.rows[kept]])
        loss: Tensor = _SoftCrossEntropy.apply(logits, tops, shares)  # type: ignore[no-untyped-call]
        total = total + weights[step] / sum(weights) * loss / max(1, tops.shape[0])
        right = (logits.argmax(-1) == tops[:, 0]) & (shares[:, 0] > 0)
        hits.append(right.float().mean().item() if tops.shape[0] else 0.0)
    return total, hits


class Trainer:
    """Trains a head over batches of a plan. After each batch `step` counts those that are done."""

    def __init__(
        self,
        draft: Draft,
        settings: TrainSettings,
        sequences: Sequence[StoredStates],
        plan: Sequence[Sequence[int]],
        batches: Batches,
        *,
        bf16: bool,
    ) -> None:
        self.draft = draft
        self.step = 0
        self._settings = settings
        self._sequences = sequences
        self._plan = plan
        self._batches = batches
        self.bf16 = bf16
        self._optimizer = torch.optim.AdamW(
            draft.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    @property
    def steps(self) -> int:
        """Batches of the whole plan."""
        return len(self._plan)

    def go(
        self, checkpoint: Path, stopped: Callable[[], bool], watch: Watcher, save_every: float = SAVE_EVERY
    ) -> Iterator[tuple[int, float, list[float]]]:
        """Train to the end of the plan, from where `checkpoint` is, if it is there. Yields after each batch its number,
        its loss and its hits. Raises Stopped after a checkpoint.
        """
        if checkpoint.exists():
            self.load(checkpoint)
        saved = time.monotonic()
        told, told_hits = 0.0, 0.0
        while self.step < self.steps:
            if stopped():
                self.save(checkpoint)
                raise Stopped
            loss, hits = self._train(self._plan[self.step])
            self.step += 1
            told = loss if not told else _GONE * told + (1 - _GONE) * loss
            told_hits = hits[0] if not told_hits else _GONE * told_hits + (1 - _GONE) * hits[0]
            watch(self.step, f"loss {told:.3f}, first draft right {told_hits:.1%}")
            yield self.step, loss, hits
            if time.monotonic() - saved >= save_every or self.step == self.steps:
                self.save(checkpoint)
                saved = time.monotonic()

    def _train(self, indices: Sequence[int]) -> tuple[float, list[float]]:
        batch = self._batches.make([self._sequences[index].load() for index in indices])
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate * learning_rate_at(self.step, self.steps)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            loss, hits = batch_loss(self.draft, batch, self._settings.ttt)
        if not math.isfinite(loss.item()):
            raise PegboardError(
                f"the loss of batch {self.step} is {loss.item()}: the training has diverged; begin anew with a lower "
                "--learning-rate and --overwrite"
            )
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        self._optimizer.step()
        return float(loss.detach()), hits

    def save(self, path: Path) -> None:
        """Write all that training goes on from."""
        tensors = {f"draft.{name}": value for name, value in self.draft.state_dict().items()}
        for index, state in self._optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
        save_tensors(path, tensors, {"step": str(self.step), "steps": str(self.steps)})

    def load(self, path: Path) -> None:
        """Go back to what `save` wrote. Raises PegboardError for a checkpoint of another plan."""
        with safe_open(str(path), "pt") as file:
            about = file.metadata() or {}
            if about.get("steps") != str(self.steps):
                raise PegboardError(f"{path} is a checkpoint of another training; --overwrite starts anew")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        weights = {name.removeprefix("draft."): one for name, one in tensors.items() if name.startswith("draft.")}
        self.draft.load_state_dict(weights)
        states: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("optimizer."):
                _, index, key = name.split(".")
                states.setdefault(int(index), {})[key] = value.clone()
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": states})
        self.step = int(about["step"])


def learning_rate_at(step: int, steps: int) -> float:
    """Return the share of the learning rate: a linear rise over the first steps, then half a cosine down to a tenth."""
    rise = max(1, round(WARM_UP * steps))
    if step < rise:
        return (step + 1) / rise
    done = (step - rise) / max(1, steps - rise)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))
