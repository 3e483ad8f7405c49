"""Files of which a run would run nothing are not imported, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiers

QUICK = "not full and not gpu and not soak"
FULL = "full and not gpu and not soak"


@pytest.mark.parametrize(
    ("mark", "markers", "left_out"),
    [
        ("pytestmark = pytest.mark.full", QUICK, True),
        ("pytestmark = [\n    pytest.mark.full,\n    pytest.mark.timeout(300),\n]", QUICK, True),
        ("pytestmark = [pytest.mark.slow, pytest.mark.gpu]", QUICK, True),
        ("pytestmark = pytest.mark.full", FULL, False),
        ("pytestmark = pytest.mark.soak", FULL, True),
        ("pytestmark = pytest.mark.full", "", False),
        ("pytestmark = pytest.mark.slow", QUICK, False),
        ("@pytest.mark.full", QUICK, False),
        ("class TestSlow:\n    pytestmark = pytest.mark.full", QUICK, False),
    ],
)
def test_what_a_files_own_mark_leaves_out(
    mark: str, markers: str, left_out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "HERE", tmp_path)
    file = tmp_path / "test_it.py"
    file.write_text(f"import pytest\n\n{mark}\n\ndef test_it():\n    pass\n")
    assert tiers.is_left_out(file, markers) is left_out


def test_what_the_table_leaves_out() -> None:
    file = tiers.HERE / "e2e/test_memory.py"
    assert tiers.is_left_out(file, QUICK)
    assert not tiers.is_left_out(file, FULL)
    assert not tiers.is_left_out(tiers.HERE / "e2e", QUICK)
