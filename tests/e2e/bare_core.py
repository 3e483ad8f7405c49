"""Answers of engines without some plugins, as JSON: ``python -m tests.e2e.bare_core CHECKPOINT NAME...``. The named
plugins are not installed, and what imports them fails.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.metadata import entry_points
from typing import Any

import numpy as np

from pegboard.core.config.compose import compose
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.plugin import ENTRY_POINT_GROUP
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.registry.discovery import discover
from pegboard.core.registry.registry import Registry

ROOM = 128
"""Tokens of KV: room for few of the requests at their full length, so that some are retracted."""
LENGTHS = (3, 33, 21, 17, 30, 12, 1, 28, 33, 9, 24, 15)


class Missing(MetaPathFinder):
    """Finds none of the plugins that are left out."""

    def __init__(self, names: Sequence[str]) -> None:
        self._packages = tuple(f"pegboard.plugins.{name}" for name in names)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if f"{fullname}.".startswith(tuple(f"{package}." for package in self._packages)):
            raise ModuleNotFoundError(f"{fullname} is left out", name=fullname)


def arrangements() -> Iterator[tuple[str, dict[str, Any]]]:
    for loop, chunk, page in itertools.product(("normal", "overlap"), (32, 0), (1, 16)):
        scheduler = {"loop": loop, "chunked_prefill_size": chunk, "estimate_max_new_tokens": 1}
        yield f"{loop}, chunks of {chunk}, pages of {page}", {"scheduler": scheduler, "page_size": page}


def requests(vocab_size: int) -> list[GenerateRequest]:
    """Greedy and seeded ones in turn, some with penalties; their prompts share beginnings. None ignores the tokens that
    end an answer: for those that do, admission knows how long they get.
    """
    draw = np.random.default_rng(30)
    stem = draw.integers(3, vocab_size, size=20).tolist()
    made = []
    for place, length in enumerate(LENGTHS):
        prompt = (stem + draw.integers(3, vocab_size, size=20).tolist())[:length]
        more: dict[str, Any] = {"temperature": 0.0} if place % 2 else {"temperature": 0.9, "seed": place, "top_p": 0.9}
        more |= {"frequency_penalty": 0.5} if place % 3 == 0 else {}
        sampling = SamplingParams(max_new_tokens=40 + place, **more)
        made.append(GenerateRequest(prompt=prompt, sampling=sampling))
    return made


def answers(checkpoint: str, registry: Registry, scheduler: dict[str, Any], page_size: int) -> dict[str, Any]:
    """Return the tokens of each answer, and how often requests were retracted."""
    data = {
        "model": {"path": checkpoint, "dtype": "float32", "device": "cpu"},
        "attention": {"use": "torch"},
        "memory": {"max_total_tokens": ROOM, "page_size": page_size},
        "scheduler": scheduler,
        "apis": [],
        "log_level": "warning",
    }
    with Engine(compose(data=data, env={}, registry=registry)) as engine:
        outputs = engine.run(requests(engine.info.vocab_size))
        return {"tokens": [output.token_ids for output in outputs], "retractions": engine.stats()["retractions"]}


def main() -> None:
    checkpoint, *names = sys.argv[1:]
    sys.meta_path.insert(0, Missing(names))
    points = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name not in names]
    registry = Registry.from_found(discover(points=points))
    found: dict[str, Any] = {name: answers(checkpoint, registry, **settings) for name, settings in arrangements()}
    loaded = sorted({module.split(".")[2] for module in sys.modules if module.startswith("pegboard.plugins.")})
    sys.stdout.write(json.dumps({"answers": found, "plugins": loaded}))


if __name__ == "__main__":
    main()
