"""The first half of a run, which needs the model: its answers, its states for them, and what it lends."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pegboard.core.engine.engine import Engine
from pegboard.toolkit.model.decoder_spec import DecoderSpec
from pegboard.toolkit.system.output import note
from pegboard.tools.train_draft.answers import HELD_OUT, AnswerFiles, Answering
from pegboard.tools.train_draft.data import StateFiles, write_states
from pegboard.tools.train_draft.draft import DraftShape
from pegboard.tools.train_draft.engines import Engines
from pegboard.tools.train_draft.progress import stage
from pegboard.tools.train_draft.prompts import Prompts
from pegboard.tools.train_draft.settings import AnswerSettings
from pegboard.tools.train_draft.states import StateReader
from pegboard.tools.train_draft.target import TAPS, Target, check_taps, default_taps, tapping_runner
from pegboard.tools.train_draft.workdir import WorkDir, read_json, write_json

_PROMPT_TOKENS = 80
"""A guess at the length of prompts, for a first look at the disk."""


class Reading:
    """Has the answers generated and the states read, as far as they are not there."""

    def __init__(
        self,
        folder: WorkDir,
        engines: Engines,
        settings: AnswerSettings,
        prompts: Prompts,
        taps: tuple[int, ...] | None,
        stopped: Callable[[], bool],
    ) -> None:
        self._folder = folder
        self._engines = engines
        self._settings = settings
        self._prompts = prompts
        self._taps = taps
        self._stopped = stopped
        self._answers = AnswerFiles(folder)
        self._states = StateFiles(folder)

    def go(self) -> None:
        """Do what is left to do. Raises Stopped; what is there is whole then."""
        with self._engines.open() as engine:
            target = Target.of(engine)
            layers = target.decoder.num_layers
            taps = default_taps(layers) if self._taps is None else check_taps(self._taps, layers)
            other = tapping_runner(engine.resolved.registry, engine.resolved.provides, engine.info.providers)
            self._look_at_disk(target.decoder)
            self._answer(engine)
            if other is None:
                self._read(engine, target, taps)
        if other is not None:
            note(f"states are read with the runner {other!r}: the one that generates cannot show them")
            with self._engines.open(f"runner.use={other}") as engine:
                self._read(engine, target, taps)

    def _look_at_disk(self, decoder: DecoderSpec) -> None:
        """Say how much disk the states take, and raise PegboardError where there is less."""
        length = self._settings.max_new_tokens / 2
        tokens = self._settings.tokens * (1 + _PROMPT_TOKENS / length)
        needed = int(tokens * StateFiles.bytes_per_token(decoder.hidden_size, TAPS))
        note(f"states will take about {needed / 1e9:.2g} GB in {self._folder.data}")
        self._folder.check_space(needed, "states")

    def _answer(self, engine: Engine) -> None:
        done = sum(one.tokens for one in self._answers)
        with self._folder.timed("answers"), stage("answers", self._settings.tokens, done, "tokens") as watch:
            Answering(engine, self._settings, self._prompts, self._answers, self._stopped, watch).go()
        found = list(self._answers)
        tokens, count = sum(one.tokens for one in found), sum(len(one.answers) for one in found)
        failed = sum(one.asked for one in found) - count
        more = f"; {failed} prompts could not be answered" if failed else ""
        if tokens < self._settings.tokens:
            more += f"; there are no more prompts, so it is fewer than --tokens {self._settings.tokens}"
        note(f"{count} answers with {tokens} tokens{more}")

    def _read(self, engine: Engine, target: Target, taps: tuple[int, ...]) -> None:
        names = [HELD_OUT, *self._answers.names()]
        found = {name: self._answers.read(name).answers for name in names}
        lengths = [len(one.prompt) + len(one.answer) for some in found.values() for one in some]
        left = sum(
            len(one.prompt) + len(one.answer)
            for name, some in found.items()
            if not self._states.path(name).exists()
            for one in some
        )
        self._folder.check_space(left * StateFiles.bytes_per_token(target.decoder.hidden_size, TAPS), "states")
        reader = StateReader(engine, taps)
        done = sum(lengths) - left
        with self._folder.timed("states"), stage("states", sum(lengths), done, "tokens") as watch:
            write_states(reader, self._answers, self._states, names, self._stopped, watch)
        used = sorted({token for some in found.values() for one in some for token in (*one.prompt, *one.answer)})
        self._lend(reader, target, taps, torch.tensor(used, dtype=torch.int64))

    def _lend(self, reader: StateReader, target: Target, taps: tuple[int, ...], used: torch.Tensor) -> None:
        weights = target.weights()
        head = weights.pop("head", None)
        lent = {f"start.{name}": weight for name, weight in weights.items()}
        if head is not None and head.shape[0] > int(used.max()):
            lent["start.head"] = head[used].clone()
        write_json(self._folder.data / "model.json", {"config": target.config, "taps": taps})
        self._states.lend({**lent, "ids": used, "embeddings": reader.embed(used)})


def read_target(folder: WorkDir) -> tuple[Target, tuple[int, ...]]:
    """Return what was read from: the model's config, and the taps."""
    found = read_json(folder.data / "model.json") or {}
    config, taps = found.get("config"), found.get("taps")
    assert isinstance(config, dict)
    assert isinstance(taps, list)
    return Target(folder.data, config, DecoderSpec.from_config(config)), tuple(taps)


def head_shape(decoder: DecoderSpec, taps: tuple[int, ...], draft_vocab: int) -> DraftShape:
    """Return the shape of a head for a model: that of one of its layers."""
    return DraftShape(
        hidden=decoder.hidden_size,
        intermediate=decoder.intermediate_size,
        heads=decoder.num_heads,
        kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        vocab=decoder.vocab_size,
        draft_vocab=draft_vocab,
        eps=decoder.rms_norm_eps,
        act=decoder.hidden_act,
        rope=decoder.rope,
        taps=taps,
    )
