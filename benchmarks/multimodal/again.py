"""A picture that was seen before: the time to its first token with its prefix cached, and with only its encoding
cached.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.multimodal.load import Showing, client_of, in_turn, once, pictures, run, shown
from benchmarks.multimodal.models import VISION, seeing_model
from benchmarks.multimodal.served import Server, Watched, serving
from pegboard.tools.bench.connection import HttpClient
from pegboard.tools.bench.images import ImageSize
from pegboard.tools.bench.records import Record

NEW, PREFIX, ENCODING = "new", "prefix cached", "encoding cached"
KNOWN = 64
"""More tokens than the texts before a picture have."""
OUTPUT = 2


@dataclass(frozen=True)
class Plan:
    """So many pictures, each shown three times."""

    size: str = "large"
    times: int = 8
    image: ImageSize = field(default_factory=lambda: ImageSize(1024, 1024))
    depth: int | None = None
    """Layers of the vision tower. None: as many as take half of a prefill."""
    kv_tokens: int = 65_536


@dataclass(frozen=True)
class Shown:
    """What showing a picture took, in seconds: to the first token, and of that to encode it."""

    case: str
    ttft: float
    encoding: float
    computing: float
    """Chunks of its prompt."""


def measure(plan: Plan, folder: Path) -> dict[str, Any]:
    """Return the figures of all times that a picture was shown."""
    depth = plan.depth or _half(plan, folder)
    return {**report(_shown(plan, folder, depth, plan.times)), "vision_layers": depth}


def report(seen: Sequence[Shown]) -> dict[str, Any]:
    """Return the times of each case in milliseconds, and by how much they are lower than for a new picture."""
    by_case = {case: [one for one in seen if one.case == case] for case in (NEW, PREFIX, ENCODING)}
    found: dict[str, Any] = {}
    for case, those in by_case.items():
        ttft = [one.ttft * 1000 for one in those]
        found[case] = {
            "ttft_ms": statistics.median(ttft),
            "min_ms": min(ttft),
            "max_ms": max(ttft),
            "encoding_ms": statistics.median(one.encoding * 1000 for one in those),
            "computing_ms": statistics.median(one.computing * 1000 for one in those),
        }
    new = found[NEW]
    found["encoding_share"] = new["encoding_ms"] / (new["encoding_ms"] + new["computing_ms"])
    for case in (PREFIX, ENCODING):
        found[f"{case}, times lower"] = {
            "median": new["ttft_ms"] / found[case]["ttft_ms"],
            "min": new["min_ms"] / found[case]["max_ms"],
            "max": new["max_ms"] / found[case]["min_ms"],
        }
    return found


def _half(plan: Plan, folder: Path) -> int:
    """Return how many layers of the vision tower take as long as the text tower takes for a picture's prompt."""
    depth = int(VISION[plan.size]["depth"])
    new = [one for one in _shown(plan, folder, depth, 3) if one.case == NEW]
    encoding = statistics.median(one.encoding for one in new)
    computing = statistics.median(one.computing for one in new)
    return max(2, round(depth * computing / encoding))


def _shown(plan: Plan, folder: Path, depth: int, times: int) -> list[Shown]:
    model = seeing_model(folder, plan.size, depth)
    config = {"memory": {"max_total_tokens": plan.kv_tokens}}
    with serving("again", model, config=config, watched=True) as server:
        return run(_show(server, plan, times))


async def _show(server: Server, plan: Plan, times: int) -> list[Shown]:
    """Show each picture three times in a row: new; after the same text; and after another text."""
    random = np.random.default_rng(0)
    found = []
    async with client_of(server.url) as client:
        for number, picture in enumerate(pictures(random, times + 1, plan.image)):
            for case, before, question in (
                (NEW, f"{number} Look: ", "What is this?"),
                (PREFIX, f"{number} Look: ", "Who made it?"),
                (ENCODING, f"Another look, {number}: ", "What is this?"),
            ):
                prompt = shown(picture, question, before)
                (record,) = (await in_turn(client, Showing(), [once(prompt, OUTPUT)])).records
                _check(case, record)
                one = _figures(case, record, server.watched)
                found += [one] if number else []
    await _check_encodings(server, 2 * (times + 1))
    return found


def _figures(case: str, record: Record, watched: Watched) -> Shown:
    steps = watched.in_order(record.sent, record.first)
    seconds = {kind: sum(one.seconds for one in steps if one.kind == kind) for kind in ("piece", "chunk")}
    return Shown(case, record.ttft, seconds["piece"], seconds["chunk"])


def _check(case: str, record: Record) -> None:
    """Raise RuntimeError where the cache gave something else than the case says."""
    cached = record.cached_tokens or 0
    if (cached > KNOWN) != (case == PREFIX):
        raise RuntimeError(f"{case}: {cached} of {record.prompt_tokens} tokens were in the prefix cache")


async def _check_encodings(server: Server, shown_again: int) -> None:
    """Raise RuntimeError where a picture was encoded twice."""
    import msgspec

    async with client_of(server.url) as client:
        said = msgspec.json.decode(await _body(client))["scheduler"]
    if (said["encoded_pieces"], said["encoder_cache_hits"]) != (shown_again // 2, shown_again // 2):
        raise RuntimeError(f"{said['encoded_pieces']} pictures were encoded, {said['encoder_cache_hits']} found")


async def _body(client: HttpClient) -> bytes:
    _, _, data = await client.whole("GET", "/server_info")
    return data
