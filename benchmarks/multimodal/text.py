"""Text on a model that takes pictures, beside its text tower alone; and beside an earlier checkout."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.multimodal.load import CHAT, checked, client_of, load, ratio, rest, run
from benchmarks.multimodal.models import seeing_model, text_tower
from benchmarks.multimodal.served import MODEL, Server, serving
from pegboard.tools.bench.apis import Wanted
from pegboard.tools.bench.figures import figures
from pegboard.tools.bench.records import Record
from pegboard.tools.bench.workloads import WARM_UP_RUN, Kind, Random, Shape

SEEING, TOWER, BEFORE = "takes pictures", "text tower", "text tower, before"


@dataclass(frozen=True)
class TextPlan:
    """Chats of `words` words, `streams` at a time, answered with `output` tokens."""

    size: str = "small"
    rounds: int = 5
    requests: int = 48
    streams: int = 16
    words: int = 64
    output: int = 64
    before: str = ""
    """The Python of an earlier checkout."""


@dataclass(frozen=True)
class Speed:
    """Output tokens per second, and milliseconds of the processor that one of them took in all processes."""

    tokens_per_s: float
    cpu_ms: float


def measure(plan: TextPlan, folder: Path) -> dict[str, Any]:
    """Return the speed of each server by round, and ratios of the same round. Servers are all up, and asked in
    turn, in another order each time.
    """
    seeing = seeing_model(folder, plan.size)
    tower = text_tower(seeing, folder)
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(serving(SEEING, seeing)),
            stack.enter_context(serving(TOWER, tower)),
        ]
        if plan.before:
            servers.append(stack.enter_context(serving(BEFORE, tower, python=plan.before)))
        answers = {one.name: run(_answers(one, plan)) for one in servers}
        rounds = [run(_round(servers, plan, number)) for number in range(plan.rounds)]
    return report(rounds, answers)


def report(rounds: Sequence[Mapping[str, Speed]], answers: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return medians, ratios of throughput and of the processor's time, and whether all servers say the same."""
    found: dict[str, Any] = {
        "tokens_per_s": {name: statistics.median(one[name].tokens_per_s for one in rounds) for name in rounds[0]},
        "cpu_ms_per_token": {name: statistics.median(one[name].cpu_ms for one in rounds) for name in rounds[0]},
        "same_answers": len({tuple(one) for one in answers.values()}) == 1,
        "rounds": [{name: asdict(one) for name, one in those.items()} for those in rounds],
    }
    for key, first, second in (("to_tower", SEEING, TOWER), ("to_before", TOWER, BEFORE)):
        if second in rounds[0]:
            found[key] = ratio([(one[first].tokens_per_s, one[second].tokens_per_s) for one in rounds])
            found[f"{key}_cpu"] = ratio([(one[first].cpu_ms, one[second].cpu_ms) for one in rounds])
    return found


def _shape(plan: TextPlan, requests: int) -> Shape:
    return Shape(requests, plan.words, plan.output)


async def _answers(server: Server, plan: TextPlan) -> list[str]:
    """Warm up; what it says to some prompts, one by one."""
    said = []
    async with client_of(server.url) as client:
        for session in _workload(plan, 4).sessions(WARM_UP_RUN):
            record = Record(0, output_len=plan.output)
            reader = CHAT.reader(record, keep=True)
            body = CHAT.encode(session.turns[0].new, plan.output, Wanted(MODEL))
            await client.send(client.request("POST", CHAT.path, body), reader)
            reader.finish()
            said.append("".join(reader.text))
        sessions = _workload(plan, plan.streams).sessions(WARM_UP_RUN + 1)
        checked(await load(client, CHAT).closed(sessions, plan.streams))
    return said


def _workload(plan: TextPlan, requests: int) -> Random:
    return Random(_shape(plan, requests), Kind.MESSAGES, (0, 1), 0)


async def _round(servers: Sequence[Server], plan: TextPlan, number: int) -> dict[str, Speed]:
    """Return the speed of each server, with the same prompts, which are new ones."""
    sessions = _workload(plan, plan.requests).sessions(number)
    found = {}
    order = servers if number % 2 == 0 else servers[::-1]
    for server in order:
        spent = server.process.cpu_seconds()
        async with client_of(server.url) as client:
            outcome = checked(await load(client, CHAT).closed(sessions, plan.streams))
        spent = server.process.cpu_seconds() - spent
        said = figures(outcome)
        found[server.name] = Speed(said["output_throughput"], spent * 1000 / said["output_tokens"])
        await rest(0.2)
    return found
