"""A prefill and a decode engine in one process, and a joiner that posts each request to both, as a router does."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from pegboard.conformance.servers import free_ports
from pegboard.core.engine.engine import Engine, GenerateOutput
from pegboard.core.interfaces.client import GenerateRequest

ROOMS = itertools.count(10**6)
PATIENCE = 120.0


@dataclass
class Pair:
    prefill: Engine
    decode: Engine
    port: int

    def said(self, room: int | None = None, **more: Any) -> dict[str, Any]:
        """Return what a router adds to a body, as `params` of the request."""
        room = next(ROOMS) if room is None else room
        at = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.port, "bootstrap_room": room}
        return {"disagg": {**at, **more}}

    def ask(self, requests: Sequence[GenerateRequest]) -> tuple[list[GenerateOutput], list[GenerateOutput]]:
        """Post all of them to both engines. Return decode's answers and prefill's, in the requests' order."""
        rooms = [msgspec.structs.replace(one, params={**one.params, **self.said()}) for one in requests]
        outputs = [{engine.submit(one): GenerateOutput(one.rid or "") for one in rooms} for engine in self.both]
        until = time.monotonic() + PATIENCE
        while not all(one.finish_reason for found in outputs for one in found.values()):
            assert time.monotonic() < until, [engine.stats()["gate_stats"] for engine in self.both]
            for engine, found in zip(self.both, outputs, strict=True):
                if all(one.finish_reason for one in found.values()):
                    engine.built.scheduler.step()  # an engine without requests does not step by itself
                for chunk in engine.poll():
                    found[chunk.rid].add(chunk)
        return list(outputs[1].values()), list(outputs[0].values())

    def settle(self, seconds: float = 10.0) -> None:
        """Step both until neither holds anything for the other."""
        until = time.monotonic() + seconds
        while any(self.left(engine) for engine in self.both) and time.monotonic() < until:
            for engine in self.both:
                engine.built.scheduler.step()
            time.sleep(0.001)

    def left(self, engine: Engine) -> dict[str, float]:
        """Return what an engine without requests should not have any more."""
        stats = engine.stats()
        names = ("held_requests", "blocked_requests", "seated_requests", "quarantined_tokens")
        return {name: stats[name] for name in names if stats[name]}

    def check_books(self) -> None:
        for engine in self.both:
            assert not self.left(engine)
            memory = engine.built.scheduler.components.memory
            assert memory.idle_error() is None
            memory.cache.check()
            stats = engine.stats()
            assert stats["book_errors"] == stats["failed_batches"] == stats["plugin_failures"] == 0

    @property
    def both(self) -> tuple[Engine, Engine]:
        return self.prefill, self.decode


@contextlib.contextmanager
def pair(
    prefill: Mapping[str, Any], decode: Mapping[str, Any], *, transfer: str = "tcp", **options: Any
) -> Iterator[Pair]:
    """Both engines, with configs of their own; `options` are those of both gates."""
    (port,) = free_ports(1)
    shared = {"kv_transfer": {"use": transfer}}
    gate = {"use": "disagg", **options}
    here = {**prefill, **shared, "gates": [{**gate, "role": "prefill", "listen": f"127.0.0.1:{port}"}]}
    there = {**decode, **shared, "gates": [{**gate, "role": "decode"}]}
    with Engine.from_config(here) as one, Engine.from_config(there) as other:
        yield Pair(one, other, port)


def assert_answered(outputs: Sequence[GenerateOutput]) -> None:
    failed = [one.finish_reason for one in outputs if one.finish_reason["type"] == "abort"]
    if failed:
        pytest.fail(f"{len(failed)} failed, the first with {failed[0]}")
