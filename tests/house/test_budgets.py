"""How many lines each room may have, and how often the core may name a feature: lower these as features move out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.house.drawing import ROOT, House, room

ROOMS = {
    "conformance": 18_990,
    "core.cli": 180,
    "core.config": 1_990,
    "core.engine": 2_190,
    "core.frontend": 930,
    "core.interfaces": 6_320,
    "core.pipeline": 5_830,
    "core.registry": 940,
    "core.server": 1_390,
    "core.worker": 610,
    "plugins": 76_760,
    "toolkit": 20_730,
    "tools": 12_440,
}
"""Lines of a room at most. Whoever must add to a room of core/ says by how much and why, and raises its figure here."""

HEART = ("scheduler", "planner", "admission", "memory", "batch", "worker", "results", "lifecycle", "gates", "running")
HEART_LINES = 3_000
"""Lines of `HEART` and of what of step, loops, recovery, sources there is, in core/pipeline and core/worker, together
at most."""

FEATURES: Mapping[str, tuple[str, int]] = {
    "speculation": (r"drafts?|drafted|drafter|drafting|specul\w*", 8),
    # A parameter of users with its type (10), which the core refuses where no plugin serves it (2).
    "grammar": (r"grammars?", 9),
    "media": (r"media|encoders?|pictures?|images?|videos?|pixels?", 1),
    "row outputs": (r"poolers?|pooling|hidden_states?|prompt_logprobs?", 18),
    # Two capabilities of caches by their names (4), keys and origins that answers and figures have (5), a list of other
    # servers' flags (3), what `config check` does not look at, and a name of torch's.
    "tiers": (r"tiers?|hiradix|storages?|prefetch\w*", 9),
    "split prefill": (r"split_prefill\w*", 6),
    "hand-over of KV": (r"seats?|seated|kv_transfers?", 1),
    "adapters": (r"loras?", 0),
}
"""Whole words (also within identifiers) that name a feature, and how many of them core/ may have."""


@pytest.fixture(scope="module")
def house() -> House:
    return House.read()


def words_of(pattern: str, root: Path = ROOT / "core") -> Counter[str]:
    """Count the words of a feature per file of the core. `HiddenStates` and `hidden_states` are words alike."""
    word = re.compile(rf"(?<![A-Za-z])(?:{pattern})(?![A-Za-z])", re.IGNORECASE)
    found = Counter[str]()
    for path in root.rglob("*.py"):
        text = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", path.read_text("utf-8"))
        found[path.relative_to(root).as_posix()] += len(word.findall(text))
    return +found


def test_no_room_grows(house: House) -> None:
    lines = Counter[str]()
    for name, count in house.lines.items():
        lines[room(name)] += count
    grown = {name: f"{count}, not {ROOMS[name]}" for name, count in lines.items() if count > ROOMS.get(name, 10)}
    assert not grown, "what could leave instead?"


def test_the_heart_does_not_grow(house: House) -> None:
    names = (*HEART, "step", "loops", "recovery", "sources")
    rooms = ("pipeline", "worker")
    lines = sum(house.lines.get(f"pegboard.core.{room}.{name}", 0) for room in rooms for name in names)
    assert lines <= HEART_LINES, "what could leave instead?"


@pytest.mark.parametrize("feature", FEATURES)
def test_the_core_does_not_name_a_feature_more_often(feature: str) -> None:
    pattern, allowed = FEATURES[feature]
    found = words_of(pattern)
    assert found.total() <= allowed, f"{feature} is a plugin's; most often in {found.most_common(5)}"


def test_words_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('class DraftTree:\n    """Of a draft."""\n    num_drafts = 1\n    overdraft = 2\n')
    assert words_of(r"drafts?", tmp_path) == {"a.py": 3}
