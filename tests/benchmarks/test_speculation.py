"""The benchmark of speculation: what is made of its figures, and that a head is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.speculation import __main__ as speculation
from benchmarks.speculation import peer
from tests.plugins.spec_eagle.heads import DEMO


def test_where_drafts_break_even() -> None:
    found = {
        f"told, {rate}": {"accept_length": length, "ratio": {"median": 0.5 * length - 0.2}}
        for rate, length in enumerate((1, 2, 4))
    }
    found["chain of 3"] = {"accept_length": 9, "ratio": {"median": 0.0}}
    assert speculation.break_even(found) == pytest.approx(2.4)


def test_ratios_are_taken_run_by_run() -> None:
    rates = {
        "ours plain": [9, 10, 20, 30],
        "ours drafts": [9, 20, 20, 60],
        "vllm plain": [1, 1, 1, 1],
        "vllm drafts": [1, 2, 3, 4],
    }
    found = peer.summary(
        {name: list(map(float, one)) for name, one in rates.items()}, {"ours": [9.0, 1, 2, 3], "vllm": [9.0, 1, 1, 1]}
    )
    assert found["ours"] == {"plain": 20, "drafts": 20, "ratio": 2, "accept_length": 2}
    assert found["vllm"]["ratio"] == 3
    assert "| free | ours | 20 | 20 | 2.00 | 2.00 |" in peer.table({"free": found})


@pytest.mark.full
def test_a_head_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["", "eagle", "--draft", str(DEMO.write(tmp_path)), "--quick"])
    speculation.main()
    said = capsys.readouterr().out
    assert "| chain of 3 |" in said
    assert "| told, 1 |" in said
    assert "would break even at an accept length of" in said
    (told,) = (line for line in said.splitlines() if line.startswith("| told, 1 |"))
    assert float(told.split("|")[5]) > 2, "right drafts are accepted"
