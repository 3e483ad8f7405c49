"""What requests say to a gate, and what it keeps of that: a part of the suite of AdmissionGate."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from pegboard.conformance.admission_gate.rig import GateRig, ManualClock, gated_request
from pegboard.conformance.rig.clocks import ClockWatch
from pegboard.conformance.rig.footprint import growing, growth, with_class
from pegboard.conformance.rig.traces import traces
from pegboard.core.interfaces.admission_gate import AdmissionGate, AdmissionGateContext, GateState
from pegboard.core.interfaces.plugin import BodyField

SOON = 5.0
"""Seconds within which threads end that `close` has told to."""

MANY = 100
KEPT_BYTES = 24
"""Bytes that may be kept of each of so many requests that are gone."""

SAMPLES: Mapping[type, object] = {int: 1, str: "sample", bool: True, float: 0.5}
"""What a client may give for a field of a body, by its type."""


class Said(dict[str, Any]):
    """What a request says to a gate. `read` are the fields that are looked at."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        super().__init__(said)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        self.read |= super().keys()
        return super().__iter__()

    def keys(self) -> Any:
        self.read |= super().keys()
        return super().keys()

    def items(self) -> Any:
        self.read |= super().keys()
        return super().items()


class SayingTests(GateRig):
    """Fields of bodies are those that the gate reads, and what requests said goes with them."""

    def said_otherwise(self, params: Mapping[str, Any], number: int) -> Mapping[str, Any]:
        """Return the params of a request that is not the `number`th that says just this: one text or integer after the
        other is another one. Override this where what the gate would keep of it is meant to stay.
        """
        leaves = [path for name in self.names() if name in params for path in _leaves(params[name], (name,))]
        varied: Mapping[str, Any] = _with_another(params, leaves[number % len(leaves)], number) if leaves else params
        return varied

    def test_declared_fields_are_those_that_it_reads(self, gate: AdmissionGate) -> None:
        """APIs pass what a client gives for a field on as ``params[<provider's name>][<field's name>]``."""
        record = self.subject.record
        fields = record.provider.body if record is not None else ()
        if not fields:
            pytest.skip("its record declares no fields of request bodies")
        own = self.subject.own_name
        asked = self.blocked_request(gate).params.get(own)
        said = Said(asked if isinstance(asked, Mapping) else {})
        for field in fields:
            _check_type(own, field, dict(said))
        names = dict.fromkeys(said)
        req = gated_request({own: Said({**{field.name: SAMPLES[field.kind] for field in fields}, **said})})
        seen: Said = req.params[own]
        assert isinstance(seen, Said)
        seen.read.clear()
        if gate.concerns(req):
            gate.enter(req)
            gate.cancel(req)
        for field in fields:
            assert field.name in seen.read or field.name in names, (
                f"the record declares the field {field.name!r} of request bodies, which reaches the gate as "
                f"params[{own!r}][{field.name!r}], but it does not look there. It looks at "
                f"{sorted(seen.read) or 'nothing'} in params[{own!r}], and blocked_request() says {list(names)} there"
            )

    def test_what_requests_said_is_forgotten(self, gate: AdmissionGate, clock: ManualClock) -> None:
        """Many come and go, and each says something else, as clients may; an hour passes now and then."""
        params, numbers = self.blocked_request(gate).params, itertools.count()
        if self.said_otherwise(params, 1) == params:
            pytest.skip("blocked_request() says nothing that could be said otherwise")

        def work() -> None:
            for number in itertools.islice(numbers, MANY):
                req = gated_request(self.said_otherwise(params, number))
                if not gate.concerns(req):
                    continue
                if gate.enter(req).state is not GateState.OPEN:
                    gate.cancel(req)
                elif gate.finished(req):
                    gate.drop(req)
            clock.advance(3600.0)
            gate.poll([])
            list(gate.released())

        grown = growth(work, KEPT_BYTES * MANY, with_class(gate), gate.ctx, gate.options, *self.around(gate))
        assert grown <= KEPT_BYTES * MANY, (
            f"the gate keeps {grown:,} bytes more after each {MANY} requests that have said other things and are gone"
            f"{growing(work, gate)}: forget what a request said when the last one that said it has ended"
        )

    def test_another_that_says_the_same_may_be_cancelled(self, gate: AdmissionGate, clock: ManualClock) -> None:
        """Whether that one was let through or not: the one before it opens as if it had never come."""
        req, _ = self.blocked(gate)
        twin = gated_request(req.params, sampling=req.sampling)
        verdict = self.enter(gate, twin)
        if verdict.state is not GateState.OPEN:
            gate.cancel(twin)
        elif gate.finished(twin):
            gate.drop(twin)
        self.clear(gate, clock, req)
        try:
            self.wait_until_open(gate, clock, req)
        except (Exception, pytest.fail.Exception) as error:
            raise AssertionError(
                "a request that says the same as one before it came and was cancelled, or has ended, and the one "
                f"before does not open: {type(error).__name__}: {error}"
            ) from error

    def test_time_is_that_of_the_context(self, gate: AdmissionGate, clock: ManualClock) -> None:
        """So that a simulated run behaves as a real one."""
        asked = ClockWatch()
        with asked.watched():
            req, _ = self.blocked(gate)
            self.poll(gate, req)
            self.clear(gate, clock, req)
            clock.advance(0.01)
            self.poll(gate, req)
            gate.cancel(req)
        assert not asked.found, (
            f"the gate asks {', '.join(sorted(asked.found))}: its time is that of ctx.clock, and no other. It may be "
            "virtual time, as in pegboard simulate"
        )

    def test_close_lets_threads_go(self, clock: ManualClock) -> None:
        before = set(threading.enumerate())
        gate: AdmissionGate = self.build(AdmissionGateContext(clock))
        gate.close()
        until = time.monotonic() + SOON
        while running := set(threading.enumerate()) - before:
            names = ", ".join(sorted(thread.name for thread in running))
            assert time.monotonic() < until, f"close() leaves threads running: {names}"
            time.sleep(0.01)

    def test_gates_know_nothing_of_each_other(self, gate: AdmissionGate) -> None:
        """Several engines may live in a process."""
        other = self.build(AdmissionGateContext(gate.ctx.clock, gate.ctx.cache))
        try:
            req, _ = self.blocked(gate)
            found = traces(other, req)
        finally:
            other.close()
        assert not found, f"another gate, which never met a request, keeps it in {', '.join(found)}: keep state in self"


def _check_type(own: str, field: BodyField, said: Mapping[str, Any]) -> None:
    """Fail where the test class says what no API would let through."""
    value = said.get(field.name)
    fits = value is None or type(value) is field.kind or (field.kind is float and type(value) is int)
    assert fits, (
        f"the record declares BodyField({field.name!r}, {field.kind.__name__}), but blocked_request() says "
        f"params[{own!r}][{field.name!r}] = {value!r}: APIs let only values of the declared type through. Declare what "
        "the gate reads"
    )


def _leaves(said: object, path: tuple[object, ...]) -> Iterator[tuple[object, ...]]:
    """Yield where texts and integers are in what a request says."""
    if isinstance(said, Mapping):
        for name, value in said.items():
            yield from _leaves(value, (*path, name))
    elif isinstance(said, str) or type(said) is int:
        yield path


def _with_another(said: Any, path: tuple[object, ...], number: int) -> Any:
    """Return a copy in which the text or integer at a place is another one."""
    if not path:
        return f"{said}-{number}" if isinstance(said, str) else said + number
    return {**said, path[0]: _with_another(said[path[0]], path[1:], number)}
