"""The benchmark of FlashInfer's planning runs."""

from __future__ import annotations

from benchmarks.planning import batch, kinds, measure


def test_it_measures_both_lengths() -> None:
    short, long = measure(4, (64, 512), rounds=3)
    assert short > 0
    assert long > 0
    assert len({kind.kv_group for kind in kinds()}) == 2
    assert int(batch(4, 64).seq.max()) <= 64
