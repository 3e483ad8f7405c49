"""What is trained on: states in files beside the answers, what the model lends, the draft vocabulary, and batches."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from pegboard.core.interfaces.errors import PegboardError
from pegboard.tools.train_draft.answers import AnswerFiles, Stopped
from pegboard.tools.train_draft.progress import Watcher
from pegboard.tools.train_draft.states import SequenceStates, StateReader
from pegboard.tools.train_draft.workdir import WorkDir, replacing

_LENT = "target"


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, whole or not at all."""
    with replacing(path) as new:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(new), metadata)


class TensorFile(Protocol):
    """An open safetensors file."""

    def get_tensor(self, name: str) -> Tensor: ...

    def get_slice(self, name: str) -> Mapping[slice, Tensor]: ...


class StateFiles:
    """Files of states, each for a file of answers."""

    def __init__(self, folder: WorkDir) -> None:
        self._folder = folder.data / "states"
        self._lent = folder.data / f"{_LENT}.safetensors"

    def path(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"

    @staticmethod
    def bytes_per_token(hidden: int, taps: int) -> int:
        """Return about how much a token takes; those of answers take a little more than those of prompts."""
        return 2 * hidden * taps + 400

    def write(self, name: str, sequences: Sequence[SequenceStates]) -> None:
        """Write the states of a file of answers."""
        whole: dict[str, Tensor] = {}
        if sequences:
            whole = {
                "ids": torch.cat([one.ids for one in sequences]),
                "taps": torch.cat([one.taps for one in sequences]),
                "tops": torch.cat([one.tops for one in sequences]),
                "shares": torch.cat([one.shares for one in sequences]).half(),
            }
        tensors = {
            **whole,
            "lengths": torch.tensor([one.ids.shape[0] for one in sequences]),
            "prompts": torch.tensor([one.prompt for one in sequences]),
        }
        save_tensors(self.path(name), tensors)

    def open(self, name: str) -> list[StoredStates]:
        """Return the sequences of a file; their tensors are read when they are used."""
        try:
            file: TensorFile = safe_open(str(self.path(name)), "pt")
        except (OSError, SafetensorError) as error:
            raise PegboardError(f"{self.path(name)} cannot be read: {error}; --overwrite starts anew") from None
        found: list[StoredStates] = []
        start = row = 0
        for length, prompt in zip(
            file.get_tensor("lengths").tolist(), file.get_tensor("prompts").tolist(), strict=True
        ):
            found.append(StoredStates(file, start, length, row, prompt))
            start, row = start + length, row + length - prompt
        return found

    def lend(self, tensors: dict[str, Tensor]) -> None:
        """Write what training needs of the model."""
        save_tensors(self._lent, tensors)

    def lent(self) -> dict[str, Tensor] | None:
        """Return it: `ids` int64 [n] in ascending order with their `embeddings` [n, hidden], and under "start." what
        the head begins with. None where it is not written yet.
        """
        return load_file(str(self._lent)) if self._lent.exists() else None


@dataclass(frozen=True, slots=True)
class StoredStates:
    """A sequence in a file: tokens [start, start + length), rows of the answer from `row` on."""

    file: TensorFile
    start: int
    length: int
    row: int
    prompt: int

    @property
    def entries(self) -> int:
        """See `SequenceStates.entries`."""
        return max(0, self.length - 2)

    def load(self) -> SequenceStates:
        """Read it."""
        tokens = slice(self.start, self.start + self.length)
        rows = slice(self.row, self.row + self.length - self.prompt)
        return SequenceStates(
            self.file.get_slice("ids")[tokens],
            self.prompt,
            self.file.get_slice("taps")[tokens],
            self.file.get_slice("tops")[rows],
            self.file.get_slice("shares")[rows].float(),
        )


def write_states(
    reader: StateReader,
    answers: AnswerFiles,
    files: StateFiles,
    names: Iterable[str],
    stopped: Callable[[], bool],
    watch: Watcher,
) -> None:
    """Write the files of states that are missing. Raises Stopped; the files that are there are whole then."""
    done = 0
    for name in names:
        found = answers.read(name).answers
        tokens = sum(len(one.prompt) + len(one.answer) for one in found)
        if not files.path(name).exists():
            sequences: list[SequenceStates] = []
            read = done
            for one in reader.read(found):
                if stopped():
                    raise Stopped
                sequences.append(one)
                read += one.ids.shape[0]
                watch(read)
            files.write(name, sequences)
        done += tokens
        watch(done)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens that a head can draft: `ids` int64 [draft vocabulary] in ascending order, of `size` tokens in all."""

    ids: Tensor
    size: int

    @classmethod
    def most_frequent(cls, answers: Iterable[Sequence[int]], most: int, size: int) -> Vocabulary:
        """Return the most frequent tokens of answers, at most `most`; of equally frequent ones the lower ids."""
        counts: Counter[int] = Counter()
        for answer in answers:
            counts.update(answer)
        ranked = sorted(counts, key=lambda token: (-counts[token], token))
        return cls(torch.tensor(sorted(ranked[:most]), dtype=torch.int64), size)

    def __len__(self) -> int:
        return self.ids.shape[0]

    def draft_ids(self) -> Tensor:
        """Return int64 [size]: each token's number in the draft vocabulary, -1 where it has none."""
        found = torch.full((self.size,), -1, dtype=torch.int64)
        found[self.ids] = torch.arange(len(self))
        return found

    def d2t(self) -> Tensor:
        """Return int64 [draft vocabulary]: what to add to a draft id to have the token's."""
        return self.ids - torch.arange(len(self))

    def t2d(self) -> Tensor:
        """Return bool [size]: whether a token can be drafted."""
        return self.draft_ids() >= 0


def plan(lengths: Sequence[int], epochs: int, most: int, seed: int) -> list[list[int]]:
    """Return the batches of all epochs as indices of sequences: in an order that `seed` draws anew for each epoch, of
    at most `most` entries, or a single sequence that has more.
    """
    chance = random.Random(seed)
    usable = [index for index, length in enumerate(lengths) if length > 0]
    batches: list[list[int]] = []
    for _ in range(epochs):
        order = list(usable)
        chance.shuffle(order)
        batch: list[int] = []
        entries = 0
        for index in order:
            if batch and entries + lengths[index] > most:
                batches.append(batch)
                batch, entries = [], 0
            batch.append(index)
            entries += lengths[index]
        if batch:
            batches.append(batch)
    return batches
