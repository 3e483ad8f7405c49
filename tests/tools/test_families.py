"""What docs/models.md says of families is what the command finds."""

from __future__ import annotations

import pytest

from tests.tools.families import read, tried
from tests.tools.family_configs import FAMILIES


def test_all_families_were_tried() -> None:
    """After a change of the list: `python -m tests.tools.families --write`, and `make docs`."""
    assert list(read()) == list(FAMILIES)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v2", "glm4_moe_lite", "olmoe", "deepseek_v32", "falcon"])
def test_some_are_found_as_the_page_has_them(name: str) -> None:
    assert tried(name) == read()[name]
