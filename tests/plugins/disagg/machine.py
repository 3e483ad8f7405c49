"""Clients, servers and a bad network, as a state machine."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.plugins.disagg.servers import Broken
from tests.plugins.disagg.world import Setup, World

NUMBERS = st.integers(0, 50)
KEYS = st.sampled_from(["a", "a", "b"])
ROLES = st.sampled_from(["prefill", "decode"])
WHERE = st.sampled_from(["both"] * 6 + ["prefill", "decode"])


class RoomMachine(RuleBasedStateMachine):
    """They do what they like; `World` says what must hold. Most rules let things go on, so that something happens."""

    setup = Setup()
    broken = Broken()

    @initialize()
    def build(self) -> None:
        self.world = World(self.setup, self.broken)

    @rule(length=st.integers(1, 30), where=WHERE, unlike=st.integers(0, 9), times=st.integers(0, 4), principal=KEYS)
    def post(self, length: int, where: str, unlike: int, times: int, principal: str) -> None:
        self.world.post(length, where, alike=unlike > 0, principal=principal)
        self.work(times)

    @rule(length=st.integers(1, 30), room=st.integers(1, 3), times=st.integers(0, 4))
    def post_again(self, length: int, room: int, times: int) -> None:
        """A room's number comes once more, with another prompt."""
        self.world.post(length, room=room)
        self.work(times)

    @rule(times=st.integers(1, 4))
    def work(self, times: int) -> None:
        """Everything works for a while, but no read ends."""
        for _ in range(times):
            self.world.work()

    @rule(times=st.integers(1, 4))
    def work_well(self, times: int) -> None:
        for _ in range(times):
            self.world.work()
            self.world.end_read(0, True)

    @rule(role=ROLES)
    def step(self, role: str) -> None:
        self.world.step(role)

    @rule(role=ROLES, number=NUMBERS, times=st.integers(0, 3))
    def abort(self, role: str, number: int, times: int) -> None:
        self.world.abort(role, number)
        self.work(times)

    @rule(number=NUMBERS, read=st.integers(0, 1), times=st.integers(0, 3))
    def retract(self, number: int, read: int, times: int) -> None:
        """A running request loses its memory; what is being read may end before that is heard of."""
        self.world.retract(number)
        if read:
            self.world.end_read(number, True)
        self.work(times)

    @rule(role=ROLES, pages=st.integers(0, 30))
    def crowd(self, role: str, pages: int) -> None:
        self.world.server(role).crowd(pages)

    @rule(tokens=st.integers(0, 20))
    def cache(self, tokens: int) -> None:
        self.world.decode.cached = tokens

    @rule(number=NUMBERS, times=st.integers(1, 3))
    def deliver(self, number: int, times: int) -> None:
        for _ in range(times):
            self.world.deliver(number)

    @rule(number=NUMBERS)
    def repeat(self, number: int) -> None:
        self.world.repeat(number)

    @rule(number=NUMBERS, part=st.floats(0.1, 1.0), well=st.sampled_from([None, True, True, False]))
    def read(self, number: int, part: float, well: bool | None) -> None:
        self.world.read(number, part)
        if well is not None:
            self.world.end_read(number, well)

    @rule(what=st.sampled_from(["lose", "lose", "refuse", "stop", "go on", "kill"]), role=ROLES, number=NUMBERS)
    def accident(self, what: str, role: str, number: int) -> None:
        if what == "lose":
            self.world.lose(number)
        elif what == "refuse":
            self.world.connect(works=False)
        elif what == "stop":
            self.world.stop(role)
        elif what == "kill":
            self.world.kill(role)
        else:
            self.world.go_on()

    @rule(seconds=st.sampled_from([0.05, 0.3, 0.3, 1.0, 3.0, 7.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()
            self.world.check_settled()
