"""Components: what a scheduler is made of, built elsewhere (`pegboard.core.engine.build`) and handed over whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pegboard.core.pipeline.executor import Done
from pegboard.core.pipeline.points import Points
from pegboard.toolkit.system.culprits import Culprits

if TYPE_CHECKING:
    from pegboard.core.interfaces.batch_result import BatchResult
    from pegboard.core.interfaces.executor import Executor, Pending
    from pegboard.core.interfaces.schedule_policy import SchedulePolicy
    from pegboard.core.pipeline.batch import BatchBuilder
    from pegboard.core.pipeline.gates import GateKeeper
    from pegboard.core.pipeline.memory import MemoryManager
    from pegboard.core.pipeline.results import ResultProcessor
    from pegboard.core.pipeline.step import Step
    from pegboard.core.pipeline.unsampled import Unsampled
    from pegboard.toolkit.system.step_report import StepReport

Hook = Callable[..., object]


@dataclass(frozen=True, slots=True)
class StepHooks:
    """Frozen step hooks of the scheduler: empty tuples cost nothing."""

    batch_scheduled: tuple[Hook, ...] = ()
    batch_committed: tuple[Hook, ...] = ()
    requests_finished: tuple[Hook, ...] = ()
    idle: tuple[Hook, ...] = ()


@dataclass(slots=True)
class Components:
    """The parts of one scheduler. `executor` runs its batches. Without `gates` nothing is held back, without
    `unsampled` the model is to blame for bad logits, and without a `report` steps are not logged. `runner_figures` is
    what the runner counts.
    """

    memory: MemoryManager
    policy: SchedulePolicy
    builder: BatchBuilder
    results: ResultProcessor
    executor: Executor
    gates: GateKeeper | None = None
    report: StepReport | None = None
    unsampled: Unsampled | None = None
    runner_figures: Callable[[], Mapping[str, int]] | None = None
    culprits: Culprits = field(default_factory=Culprits)
    hooks: StepHooks = field(default_factory=StepHooks)
    points: Points = field(default_factory=Points)

    def submit(self, step: Step) -> Pending[object]:
        """Start a step. Never raises: what a stage or the forward pass raises, `Pending.result` does."""
        try:
            # The later parts of a split prefill are of the same batch, and share what was packed.
            if step.work.part is None or step.work.part.first:
                self.points.pack(step)
        except Exception as error:
            return Done(None, error)
        return self.executor.submit(step.work)

    def rerun(self, half: Step) -> BatchResult:
        """Run half of a failed step at once. Raises what a stage or the forward pass raises."""
        self.points.pack(half)
        return self.executor.rerun(half.work)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and its memory allow: tokens of a context, tokens of a chunk (None: chunks are not cut), and
    the tokens that end an answer.
    """

    max_context_len: int
    chunk_size: int | None = None
    eos_ids: frozenset[int] = frozenset()
