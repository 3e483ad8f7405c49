"""The benchmark of the overlap loop runs, and sees that the loop hides something."""

from __future__ import annotations

from benchmarks.overlap import measure


def test_the_overlap_loop_hides_the_hosts_work() -> None:
    """A step of the normal loop takes both times at least; one of the overlap loop may take the longer one only."""
    found = measure(device=0.02, host=0.01, steps=12, rounds=1)
    assert found["normal"] >= 1.5
    assert found["overlap"] < found["normal"]
