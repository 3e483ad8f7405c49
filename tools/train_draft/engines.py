"""Engines of one config, with what a run changes in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pegboard.core.config.compose import ResolvedConfig, compose
from pegboard.core.engine.engine import Engine
from pegboard.toolkit.system.output import spinner


@dataclass(frozen=True, slots=True)
class Engines:
    """Builds engines from config files and overrides."""

    files: tuple[str | Path, ...]
    overrides: tuple[str, ...]

    def resolved(self, *more: str) -> ResolvedConfig:
        """Return the config with `more` overrides."""
        return compose(self.files, overrides=(*self.overrides, *more))

    @contextmanager
    def open(self, *more: str) -> Iterator[Engine]:
        """Lend an engine. Raises ConfigError and ModelError."""
        with spinner("Loading the model ..."):
            engine = Engine(self.resolved(*more))
        with engine:
            yield engine
