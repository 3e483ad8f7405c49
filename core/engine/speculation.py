"""Speculation: the chosen speculator, with what the rest of the engine must be able to do for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.contracts import LOGITS_PROCESSOR, SPECULATOR
from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.interfaces.speculator import SpeculatorContext
from pegboard.core.pipeline.speculation.drafter import Drafter

if TYPE_CHECKING:
    from pegboard.core.config.select import Choice
    from pegboard.core.engine.choose import Chosen
    from pegboard.core.interfaces.logits_processor import LogitsProcessor
    from pegboard.core.interfaces.sampler import Sampler
    from pegboard.core.interfaces.speculator import Speculator
    from pegboard.core.pipeline.grammar.follow import GrammarFollower
    from pegboard.core.pipeline.memory import MemoryManager


def make_drafter(chosen: Chosen, memory: MemoryManager, grammars: GrammarFollower) -> Drafter | None:
    """Return what asks the chosen speculator; None where it never drafts. Raises ConfigError for one whose drafts
    cannot be verified here.
    """
    settings = chosen.resolved.engine.speculation
    ctx = SpeculatorContext(chosen.spec, settings.max_nodes)
    choice = chosen.selection.choose(SPECULATOR, ctx)
    speculator = chosen.culprits.know(choice.record, choice.build(ctx))
    if speculator.max_nodes < 2:
        return None
    if "branches" in choice.provides:
        _check_trees(chosen, choice)
    processors = zip(chosen.selection.choices[LOGITS_PROCESSOR.name], chosen.processors, strict=True)
    undrafted: list[LogitsProcessor | Sampler] = []
    undrafted += [made for one, made in processors if "drafts" not in one.provides]
    # What a sampler remembers of a request would count drafts as its output.
    undrafted += [one for one in chosen.asked if one is chosen.sampler]
    return Drafter(
        speculator, settings, memory, chosen.spec.vocab_size, undrafted=undrafted, grammars=grammars,
        name=choice.name,
    )  # fmt: skip


def _check_trees(chosen: Chosen, choice: Choice[Speculator, SpeculatorContext]) -> None:
    """Raise ConfigError unless attention can tell the branches of a tree apart."""
    runner = chosen.runner
    (attention,) = chosen.selection.choices["attention"]
    by = runner if "own_attention" in runner.provides else attention
    if "tree_mask" not in by.provides:
        kind = "runner" if by is runner else "attention"
        raise ConfigError(
            f"speculation.use: the speculator {choice.name!r} proposes trees, which the {kind} {by.name!r} cannot "
            f"verify (it lacks the capability tree_mask); choose another {kind}.use"
        )
