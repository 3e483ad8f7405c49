"""ChosenSpeculator: what proposes drafts, and what it takes of memory and of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pegboard.core.interfaces.contracts import SPECULATOR
from pegboard.core.interfaces.errors import ConfigError, Unsupported
from pegboard.core.interfaces.speculator import DeviceSpeculator, SpeculatorContext
from pegboard.core.pipeline.speculation.device import DeviceDrafts
from pegboard.core.pipeline.speculation.judging import Judge

if TYPE_CHECKING:
    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.config.select import Choice, Selection
    from pegboard.core.interfaces.attention import AttentionBackend
    from pegboard.core.interfaces.layers import LayerSpec, ModelSpec
    from pegboard.core.interfaces.model_family import ModelContext
    from pegboard.core.interfaces.model_runner import ModelRunner
    from pegboard.core.interfaces.speculator import Speculator
    from pegboard.toolkit.system.culprits import Culprits


@dataclass(frozen=True, slots=True)
class ChosenSpeculator:
    """A speculator, built from configs alone. Weights that it has are loaded by `load`."""

    choice: Choice[Speculator, SpeculatorContext]
    made: Speculator

    @property
    def device(self) -> DeviceSpeculator | None:
        """The speculator itself where it drafts on the device."""
        return self.made if isinstance(self.made, DeviceSpeculator) and self.made.max_nodes > 1 else None

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The further layers of the KV pool."""
        return () if self.device is None else self.device.layers

    @property
    def lookback(self) -> int | None:
        """How many tokens are computed again behind a cached prefix; None where no states are read."""
        return None if self.device is None else self.device.lookback

    def numerics(self) -> str:
        """Name what the KV of its layers depends on beside the model."""
        return "" if self.device is None else self.device.numerics()

    def load(self, runner: ModelRunner, attention: AttentionBackend) -> None:
        """Read the weights, if there are any. Raises ModelError, and ConfigError for a model that cannot show what is
        needed of it.
        """
        if self.device is None:
            return
        ends = runner.ends()
        try:
            ends.embed(torch.zeros(1, dtype=torch.int64, device=runner.ctx.device))
        except Unsupported as error:
            raise ConfigError(f"speculation.use: {self.choice.name!r} cannot draft for this model: {error}") from error
        self.device.load(ends, attention)

    def watch(self) -> DeviceDrafts | None:
        """Return what shows it the model's states; None where it does not want to see them."""
        return None if self.device is None else DeviceDrafts(self.device, self.choice.name)

    def judge(self) -> Judge | None:
        """Return what asks it which drafts stand; None where the tokens that are drawn decide."""
        judges = "judges" in self.choice.provides and self.made.max_nodes > 1
        return Judge(self.made, self.choice.name) if judges else None


def choose_speculator(
    resolved: ResolvedConfig, selection: Selection, model: ModelContext, spec: ModelSpec, culprits: Culprits
) -> ChosenSpeculator:
    """Choose and build the speculator, before all that has to make room for its layers."""
    engine = resolved.engine
    ctx = SpeculatorContext(spec, engine.speculation.max_nodes, model, engine.scheduler.max_running_requests)
    choice = selection.choose(SPECULATOR, ctx)
    return ChosenSpeculator(choice, culprits.know(choice.record, choice.build(ctx)))
