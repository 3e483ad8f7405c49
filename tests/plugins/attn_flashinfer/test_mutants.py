"""Broken backends, each caught by the suite over the imitation."""

from __future__ import annotations

import pytest
import torch

from pegboard.conformance.attention import AttentionContract
from pegboard.conformance.attention.batches import AttentionRig, make_layer
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.plugins.attn_flashinfer.options import FlashInferOptions
from tests.plugins.attn_flashinfer import spoilt
from tests.plugins.attn_flashinfer.fake_flashinfer import FakeFlashInfer
from tests.plugins.attn_flashinfer.imitated import CASCADE, PROVIDES, Imitated


def caught(library: type[FakeFlashInfer], by: str, says: str = "") -> Mutant:
    factory = type(library.__name__, (Imitated,), {"library_type": library})
    return Mutant(factory, AttentionContract, by, CASCADE, Imitated, PROVIDES, FlashInferOptions, says)


MUTANTS = [
    caught(spoilt.IndptrOnTheDevice, "test_decode", "indptr is on the device"),
    caught(spoilt.PlansOnce, "test_steps"),
    caught(spoilt.NaturalLogSumExp, "test_sinks"),
]
MORE_MUTANTS = [
    caught(spoilt.LastPageIsEmpty, "test_decode", "last_page_len has to be 1 to 4"),
    caught(spoilt.WindowTooNarrow, "test_long_window"),
    caught(spoilt.WindowTooWide, "test_window"),
    caught(spoilt.WindowTooNarrow, "test_window"),
    caught(spoilt.WindowOverTheMask, "test_windows_count_places"),
    caught(spoilt.IndicesOnTheHost, "test_decode", "indices has to be on the device"),
    caught(spoilt.IndptrOf64Bits, "test_decode", "indptr has to be int32"),
    caught(spoilt.PlansOnce, "test_fixed_lengths"),
    caught(spoilt.DefaultScale, "test_scale"),
    caught(spoilt.NoCap, "test_logit_cap"),
    caught(spoilt.NotCausal, "test_extend"),
    caught(spoilt.HighBitFirst, "test_trees"),
    caught(spoilt.MaskedInTheGraphsBackend, "test_trees", "fa3 takes no mask"),
    caught(spoilt.NaturalLogSumExp, "test_common_prefix"),
    caught(spoilt.NoKeyScale, "test_eight_bit"),
    caught(spoilt.NoValueScale, "test_eight_bit"),
    caught(spoilt.NewBuffersAtReplay, "test_fixed_lengths"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant}-{mutant.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)


@pytest.mark.full
@pytest.mark.parametrize("mutant", MORE_MUTANTS, ids=lambda mutant: f"{mutant}-{mutant.caught_by}")
def test_more_are_caught(mutant: Mutant) -> None:
    assert_caught(mutant)


@torch.inference_mode()
def keeps_what_it_computed(library: type[FakeFlashInfer]) -> bool:
    """Return whether a batch's answer is the same when the next one has been planned, before the device was waited
    for.
    """
    rigs = [
        AttentionRig([make_layer()], lens, seed=seed) for seed, lens in enumerate([((9, 1), (30, 1)), ((3, 1),) * 2])
    ]
    backend = type(library.__name__, (Imitated,), {"library_type": library})(
        FlashInferOptions(workspace_mib=1), rigs[0].context_for()
    )
    first, second = (rig.batch(backend) for rig in rigs)
    backend.prepare(first)
    answer = backend.forward(rigs[0].q[0], *rigs[0].new_kv(), rigs[0].layers[0], first)
    before = answer.clone()
    backend.prepare(second)
    return torch.equal(before, answer)


def test_planning_twice_waits_for_a_fence() -> None:
    assert keeps_what_it_computed(FakeFlashInfer)
    assert not keeps_what_it_computed(spoilt.NoFence)
