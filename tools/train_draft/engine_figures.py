"""What an engine gains with a head on held-out prompts, pass by pass."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from pegboard.core.interfaces.client import GenerateRequest, failure
from pegboard.core.interfaces.errors import PegboardError
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.toolkit.system.output import note
from pegboard.tools.train_draft.evaluate import CHAIN, AcceptLength

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pegboard.core.engine.engine import Engine
    from pegboard.tools.train_draft.engines import Engines
    from pegboard.tools.train_draft.prompts import Prompts
    from pegboard.tools.train_draft.settings import AnswerSettings

SPECULATOR = "eagle"
"""The provider that loads heads of this layout."""
TREE_NODES = 8
STREAMS = 8
_SHAPES = {
    f"a chain of {CHAIN}": (f"steps={CHAIN}", "topk=1"),
    f"a tree of {TREE_NODES} nodes": (f"steps={CHAIN}", "topk=2", f"num_draft_tokens={TREE_NODES}"),
}


def by_engine(
    directory: Path, engines: Engines, prompts: Prompts, settings: AnswerSettings, stopped: Callable[[], bool]
) -> dict[str, AcceptLength]:
    """Return what chains and trees gain, by name, as far as the config's engine can draft so: a note says why not."""
    known = [one.name for one in engines.resolved().registry.providers("speculator") if not one.problem]
    if SPECULATOR not in known:
        note(f"not measured by the engine: no plugin here provides the speculator {SPECULATOR!r}")
        return {}
    found: dict[str, AcceptLength] = {}
    for name, options in _SHAPES.items():
        wanted = ("use=" + SPECULATOR, f"draft={directory}", "adaptive=false", f"max_batch={STREAMS}", *options)
        try:
            with engines.open(*(f"speculation.{one}" for one in wanted)) as engine:
                found[name] = _measured(engine, prompts, settings, stopped)
        except PegboardError as error:
            note(f"not measured by the engine with {name}: {error}")
    return found


def _measured(engine: Engine, prompts: Prompts, settings: AnswerSettings, stopped: Callable[[], bool]) -> AcceptLength:
    """Return what the passes over greedy answers to the held-out prompts gain."""
    from pegboard.tools.train_draft.prompts import Encoder

    encoder = Encoder(engine)
    queue = deque(encoder.ids(prompt) for prompt in prompts.held_out)
    sampling = SamplingParams(max_new_tokens=settings.max_new_tokens, temperature=0.0)
    gained: list[int] = []
    fresh: set[str] = set()
    asked = 0
    while queue or asked:
        if stopped():
            raise KeyboardInterrupt
        while queue and asked < STREAMS:
            request = GenerateRequest(prompt=queue.popleft(), sampling=sampling, stream=True, add_special_tokens=False)
            fresh.add(engine.submit(request))
            asked += 1
        for chunk in engine.poll():
            error = None if chunk.finish_reason is None else failure(chunk.finish_reason)
            if error is not None:
                raise PegboardError(error.message)
            if chunk.rid in fresh:
                # The prefill's own token comes first, and with no draft.
                fresh.discard(chunk.rid)
            elif chunk.token_ids:
                gained.append(len(chunk.token_ids))
            asked -= chunk.finish_reason is not None
    return accept_length(gained, CHAIN)


def accept_length(gained: Sequence[int], depths: int) -> AcceptLength:
    """Return the figures of passes that have gained so many tokens each."""
    if not gained:
        return AcceptLength(1.0, (0.0,) * depths, 0)
    by_depth = tuple(sum(one > depth for one in gained) / len(gained) for depth in range(1, depths + 1))
    return AcceptLength(sum(gained) / len(gained), by_depth, len(gained))
