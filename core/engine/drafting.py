"""Drafting: what an engine must be able to do for its speculator, and what asks it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pegboard.core.interfaces.contracts import LOGITS_PROCESSOR
from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.pipeline.speculation.drafter import Drafter, OnDevice

if TYPE_CHECKING:
    from pegboard.core.engine.choose import Chosen
    from pegboard.core.interfaces.executor import Executor
    from pegboard.core.interfaces.logits_processor import LogitsProcessor
    from pegboard.core.interfaces.sampler import Sampler
    from pegboard.core.pipeline.memory import MemoryManager
    from pegboard.core.pipeline.worker import Worker


class Provider(Protocol):
    """A chosen provider of any contract."""

    @property
    def name(self) -> str: ...

    @property
    def provides(self) -> frozenset[str]: ...


def check_speculator(chosen: Chosen) -> None:
    """Raise ConfigError for a speculator whose drafts cannot be made or verified here."""
    speculator, runner = chosen.speculator, chosen.runner
    if speculator.made.max_nodes < 2:
        return
    (attention,) = chosen.selection.choices["attention"]
    name, trees = speculator.choice.name, "branches" in speculator.choice.provides
    if trees and "own_attention" in runner.provides:
        _need("runner", runner, "tree_mask", f"{name!r} proposes trees, which", "verify")
    elif trees:
        _need("attention", attention, "tree_mask", f"{name!r} proposes trees, which", "verify")
    if speculator.device is None:
        return
    _need("runner", runner, "taps", f"{name!r} reads the model's states, which", "show")
    _need("runner", runner, "ends", f"{name!r} uses the model's embedding and head, which", "lend")
    if "own_weights" not in runner.provides:
        (family,) = chosen.selection.choices["model_family"]
        _need("model", family, "taps", f"{name!r} reads the model's states, which", "show")
    if trees:
        _need("attention", attention, "tree_mask", f"{name!r} drafts in trees, which", "attend over")


def _need(kind: str, by: Provider, capability: str, start: str, what: str) -> None:
    """Raise ConfigError where a provider lacks a capability."""
    if capability not in by.provides:
        raise ConfigError(
            f"speculation.use: the speculator {start} the {kind} {by.name!r} cannot {what} (it lacks the capability "
            f"{capability}); choose another {kind}.use"
        )


def make_drafter(
    chosen: Chosen,
    memory: MemoryManager,
    executor: Executor,
    worker: Worker,
) -> Drafter | None:
    """Return what asks the chosen speculator; None where it never drafts."""
    speculator = chosen.speculator
    if speculator.made.max_nodes < 2:
        return None
    processors = zip(chosen.selection.choices[LOGITS_PROCESSOR.name], chosen.processors, strict=True)
    undrafted: list[LogitsProcessor | Sampler] = []
    undrafted += [made for one, made in processors if "drafts" not in one.provides]
    # What a sampler remembers of a request would count drafts as its output.
    undrafted += [one for one in chosen.asked if one is chosen.sampler]
    device = None
    if speculator.device is not None and worker.drafts is not None:
        device = OnDevice(executor, speculator.device.reserve, worker.drafts)
    return Drafter(
        speculator.made, chosen.resolved.engine.speculation, memory, chosen.spec.vocab_size, undrafted=undrafted,
        device=device, judge=worker.judge, name=speculator.choice.name,
    )  # fmt: skip
