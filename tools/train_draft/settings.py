"""What a run is made of, by stages. A run goes on only with the settings that it began with."""

from __future__ import annotations

from dataclasses import dataclass

MAX_TTT = 7


@dataclass(frozen=True)
class AnswerSettings:
    """Which answers are generated, and how. `prompts` is the digest of the prompts, `model` what the config names.

    Of the prompts a share of `greedy` is answered greedily, as many servers do; the others at `temperature`.
    """

    model: str
    prompts: str
    tokens: int = 200_000
    held_out: int = 50
    max_new_tokens: int = 256
    temperature: float = 0.7
    greedy: float = 0.5
    streams: int = 32
    seed: int = 0


@dataclass(frozen=True)
class TrainSettings:
    """How the head is trained. `tokens` are the answer tokens that it may see, 0 for all."""

    tokens: int = 0
    draft_vocab: int = 8192
    ttt: int = 4
    epochs: int = 5
    batch_tokens: int = 512
    learning_rate: float = 2e-3
    seed: int = 0


LOSS_DECAY = 0.8
"""Weight of the loss of a step of test-time training over that of the step before it."""
WARM_UP = 0.04
"""Share of the steps in which the learning rate rises."""
TOPS = 64
"""Of the model's distribution at a position, so many of the likeliest tokens are kept to train on."""
MAX_PROMPT = 1024
"""Longer prompts (tokens) are left out: their states would fill the disk."""
SHARD = 128
"""Answers of one file, which is written when all of them are there."""
