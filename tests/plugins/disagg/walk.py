"""Long random walks through a world: most of the time everything works, and now and then something does not."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.plugins.disagg.servers import Broken
from tests.plugins.disagg.world import Setup, World

Act = Callable[[World, random.Random], None]


def _post(world: World, luck: random.Random) -> None:
    if sum(len(server.reqs) for server in world.servers) < 12:
        where = luck.choice(["both"] * 8 + ["prefill", "decode"])
        room = luck.choice([None, None, None, luck.randrange(1, 5)])
        world.post(luck.randint(1, 30), where, room=room, alike=luck.random() > 0.03)


def _role(luck: random.Random) -> str:
    return luck.choice(["prefill", "decode"])


ACTS: list[tuple[int, Act]] = [
    (20, _post),
    (60, lambda world, luck: world.work()),
    (15, lambda world, luck: world.step(_role(luck))),
    (25, lambda world, luck: world.deliver(luck.randrange(50))),
    (25, lambda world, luck: world.end_read(luck.randrange(50), luck.random() > 0.1)),
    (15, lambda world, luck: world.read(luck.randrange(50), luck.random())),
    (8, lambda world, luck: world.retract(luck.randrange(50))),
    (4, lambda world, luck: world.abort(_role(luck), luck.randrange(50))),
    (4, lambda world, luck: world.replace(luck.randrange(50))),
    (4, lambda world, luck: world.repeat(luck.randrange(50))),
    (3, lambda world, luck: world.lose(luck.randrange(50))),
    (3, lambda world, luck: world.connect(works=luck.random() > 0.3)),
    (5, lambda world, luck: world.server(_role(luck)).crowd(luck.randrange(12))),
    (3, lambda world, luck: setattr(world.decode, "cached", luck.randrange(20))),
    (20, lambda world, luck: world.wait(luck.choice([0.02, 0.05, 0.3]))),
    (3, lambda world, luck: world.wait(luck.choice([1.0, 3.0, 7.0]))),
    (1, lambda world, luck: world.wait(31.0)),
    (1, lambda world, luck: world.stop(_role(luck))),
    (6, lambda world, luck: world.go_on()),
    (1, lambda world, luck: world.kill(_role(luck)) if luck.random() < 0.3 else None),
]


def failures(world: World) -> list[str]:
    """Return how requests ended that were neither answered nor given up."""
    ends = [how for answers in world.answers.values() for how in answers.values()]
    return [how for how in ends if how not in ("length", "aborted")]


CALM: list[tuple[int, Act]] = [
    (20, lambda world, luck: world.post(luck.randint(1, 30)) if len(world.decode.reqs) < 4 else None),
    (30, lambda world, luck: world.work()),
    (30, lambda world, luck: world.step(_role(luck))),
    (30, lambda world, luck: world.deliver(luck.randrange(50))),
    (40, lambda world, luck: world.end_read(luck.randrange(50), well=True)),
    (8, lambda world, luck: world.retract(luck.randrange(50))),
    (8, lambda world, luck: world.replace(luck.randrange(50))),
    (3, lambda world, luck: setattr(world.decode, "cached", luck.randrange(20))),
    (20, lambda world, luck: world.wait(0.02)),
]
"""Nothing that happens here is a reason to fail."""


def walk(
    seed: int,
    steps: int,
    setup: Setup | None = None,
    broken: Broken | None = None,
    weighted: list[tuple[int, Act]] = ACTS,
) -> World:
    """Do `steps` things at random, let everything come to an end, and return the world. Asserts that all is well at any
    time.
    """
    luck = random.Random(seed)
    world = World(setup, broken)
    weights, acts = zip(*weighted, strict=True)
    for act in luck.choices(acts, weights, k=steps):
        act(world, luck)
        world.check()
    world.settle()
    world.check_settled()
    return world
