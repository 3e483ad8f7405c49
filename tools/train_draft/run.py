"""A run from prompts to a card, stage by stage. Each stage looks at what is there already, and does the rest."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pegboard.core.interfaces.errors import PegboardError
from pegboard.toolkit.system.output import note, write
from pegboard.tools.train_draft.answers import HELD_OUT, AnswerFiles
from pegboard.tools.train_draft.card import Facts, card
from pegboard.tools.train_draft.data import StateFiles, StoredStates, Vocabulary, plan
from pegboard.tools.train_draft.draft import Draft
from pegboard.tools.train_draft.engine_figures import by_engine
from pegboard.tools.train_draft.engines import Engines
from pegboard.tools.train_draft.evaluate import AcceptLength, by_states
from pegboard.tools.train_draft.export import begin, export, exported
from pegboard.tools.train_draft.progress import stage
from pegboard.tools.train_draft.prompts import Prompts
from pegboard.tools.train_draft.reading import Reading, head_shape, read_target
from pegboard.tools.train_draft.settings import AnswerSettings, TrainSettings
from pegboard.tools.train_draft.train import SAVE_EVERY, Batches, Trainer
from pegboard.tools.train_draft.workdir import WorkDir, read_json, replacing, write_json

LOOKS = 10
"""Times that the accept length is looked at during the training."""


@dataclass(frozen=True, slots=True)
class Data:
    """What is trained on: sequences with `tokens` answer tokens, those held out, and the draft vocabulary."""

    sequences: list[StoredStates]
    held_out: list[StoredStates]
    tokens: int
    answers: int
    vocabulary: Vocabulary
    batches: Batches


class Training:
    """The second half of a run, for which the model is not needed until the head is there."""

    def __init__(self, folder: WorkDir, settings: TrainSettings, stopped: Callable[[], bool]) -> None:
        self._folder = folder
        self._settings = settings
        self._stopped = stopped
        self._target, self._taps = read_target(folder)
        self._states = StateFiles(folder)

    def go(self, *, bf16: bool | None = None, save_every: float = SAVE_EVERY) -> Facts:
        """Train what is left of the plan, and write the head. Raises Stopped after a checkpoint."""
        lent = self._states.lent()
        assert lent is not None
        data = self._data(lent["ids"], lent["embeddings"])
        draft = Draft(head_shape(self._target.decoder, self._taps, len(data.vocabulary)))
        begin(draft, lent, data.vocabulary, self._settings.seed)
        lengths = [one.entries for one in data.sequences]
        batches = plan(lengths, self._settings.epochs, self._settings.batch_tokens, self._settings.seed)
        fast = self._products(bf16)
        trainer = Trainer(draft, self._settings, data.sequences, batches, data.batches, bf16=fast)
        self._train(trainer, data, save_every)
        export(self._folder.directory, draft, data.vocabulary, self._target.rope_config())
        found = by_states(exported(self._folder.directory, draft), data.held_out, data.batches, data.vocabulary)
        note(f"on held-out prompts, worked out from the model's states: {found}")
        parameters = sum(one.numel() for one in draft.parameters())
        return Facts(
            data.answers, data.tokens, len(data.held_out), len(data.vocabulary), parameters, trainer.steps, fast, found
        )

    def _products(self, asked: bool | None) -> bool:
        """Return whether products are in bfloat16: as asked, else as the run began, else what is faster here."""
        path = self._folder.work / "products.json"
        known = read_json(path)
        if asked is None:
            asked = bool(known["bf16"]) if known else _prefers_bf16()
        write_json(path, {"bf16": asked})
        return asked

    def _data(self, ids: torch.Tensor, embeddings: torch.Tensor) -> Data:
        files = AnswerFiles(self._folder)
        sequences: list[StoredStates] = []
        answers: list[list[int]] = []
        tokens = 0
        for name in files.names():
            for stored, answer in zip(self._states.open(name), files.read(name).answers, strict=True):
                if self._settings.tokens and tokens >= self._settings.tokens:
                    break
                sequences.append(stored)
                answers.append(answer.answer)
                tokens += len(answer.answer)
        if tokens < self._settings.tokens:
            raise PegboardError(f"--train-tokens must be at most {tokens}, the tokens of all answers")
        vocabulary = Vocabulary.most_frequent(answers, self._settings.draft_vocab, self._target.decoder.vocab_size)
        batches = Batches(ids, embeddings, vocabulary)
        return Data(sequences, self._states.open(HELD_OUT), tokens, len(answers), vocabulary, batches)

    def _train(self, trainer: Trainer, data: Data, save_every: float) -> None:
        checkpoint, log = self._folder.work / "checkpoint.safetensors", self._folder.work / "training.jsonl"
        if checkpoint.exists():
            trainer.load(checkpoint)
        _keep_first(log, trainer.step)
        looks = max(1, trainer.steps // LOOKS)
        with (
            self._folder.timed("training"),
            stage("training", trainer.steps, trainer.step, "batches") as watch,
            log.open("a") as lines,
        ):
            for step, loss, hits in trainer.go(checkpoint, self._stopped, watch, save_every):
                told: dict[str, object] = {"step": step, "loss": round(loss, 4), "hits": _rounded(hits)}
                if step % looks == 0 or step == trainer.steps:
                    found = by_states(trainer.draft, data.held_out, data.batches, data.vocabulary, bf16=trainer.bf16)
                    told |= {"accept_length": round(found.length, 4), "by_depth": _rounded(found.by_depth)}
                    note(f"after {step} of {trainer.steps} batches: {found}")
                lines.write(json.dumps(told) + "\n")
                lines.flush()


@dataclass(frozen=True, slots=True)
class DraftRun:
    """One run, or the rest of it. `threads` 0 leaves torch its own number, `bf16` None takes what is faster here."""

    folder: WorkDir
    engines: Engines
    answering: AnswerSettings
    training: TrainSettings
    prompts: Prompts
    taps: tuple[int, ...] | None
    stopped: Callable[[], bool]
    threads: int = 0
    bf16: bool | None = None
    command: str = ""
    save_every: float = SAVE_EVERY

    def go(self) -> None:
        """Do what is left to do. Raises Stopped where the user has stopped it."""
        if StateFiles(self.folder).lent() is None:
            Reading(self.folder, self.engines, self.answering, self.prompts, self.taps, self.stopped).go()
        if self.threads:
            torch.set_num_threads(self.threads)
        facts = Training(self.folder, self.training, self.stopped).go(bf16=self.bf16, save_every=self.save_every)
        measured = self._measured()
        text = card(self.answering, self.training, facts, measured, self.folder.seconds(), self.command)
        with replacing(self.folder.directory / "README.md") as new:
            new.write_text(text, "utf-8")
        write(f"{self.folder.directory}: {facts.by_states}")

    def _measured(self) -> dict[str, AcceptLength]:
        """Return what an engine gains with the head, where one can load it. It is measured once."""
        path = self.folder.work / "engine.json"
        known = read_json(path)
        if known is None:
            with self.folder.timed("evaluation"):
                found = by_engine(self.folder.directory, self.engines, self.prompts, self.answering, self.stopped)
            known = {name: one.to_json() for name, one in found.items()}
            if known:
                write_json(path, known)
        measured = {name: AcceptLength.from_json(one) for name, one in known.items() if isinstance(one, dict)}
        for name, one in measured.items():
            note(f"on held-out prompts, {name}, by the engine: {one}")
        return measured


def _keep_first(log: Path, steps: int) -> None:
    """Leave what a log says of the first `steps` batches: others come again."""
    if not log.exists():
        return
    lines = [line for line in log.read_text("utf-8").splitlines() if line.endswith("}")]
    with replacing(log) as new:
        new.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= steps), "utf-8")


def _rounded(shares: Sequence[float]) -> list[float]:
    return [round(one, 4) for one in shares]


def _prefers_bf16() -> bool:
    """Return whether products in bfloat16 take less time here than in float32; the best of three each."""
    times = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.ones(512, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        took = []
        for _ in range(3):
            began = time.perf_counter()
            a @ b
            took.append(time.perf_counter() - began)
        times[dtype] = min(took)
    return times[torch.bfloat16] < times[torch.float32]
