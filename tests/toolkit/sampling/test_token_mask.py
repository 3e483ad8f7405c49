"""Masks on logits, against a loop over bits."""

from __future__ import annotations

import pytest
import torch

from pegboard.conformance.model_runner.fakes import token_mask
from pegboard.conformance.sampler import make_sampling
from pegboard.toolkit.sampling.token_mask import apply_token_mask, unpack_mask


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 100, 1000])
def test_bits_are_tokens(vocab: int) -> None:
    draw = torch.Generator().manual_seed(vocab)
    wanted = torch.rand(5, vocab, generator=draw) < 0.3
    mask = token_mask([row.nonzero().flatten().tolist() for row in wanted], vocab)
    assert mask.shape == (5, -(-vocab // 32))
    assert bool((unpack_mask(mask, vocab) == wanted).all())
    by_hand = [[bool(int(row[token // 32]) >> token % 32 & 1) for token in range(vocab)] for row in mask]
    assert by_hand == wanted.tolist()


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [1, 3], [2]])
def test_rows_without_a_mask_are_left_alone(rows: list[int]) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    sampling = make_sampling([{}] * 4, 50)
    sampling.mask, sampling.mask_rows = token_mask([[row, 40 + row] for row in rows], 50), torch.tensor(rows)
    apply_token_mask(logits, sampling)
    for row in range(4):
        if row not in rows:
            assert bool((logits[row] == before[row]).all())
            continue
        assert logits[row].isfinite().nonzero().flatten().tolist() == [row, 40 + row]
        assert logits[row, row] == before[row, row]


def test_no_mask_is_no_work() -> None:
    logits = torch.zeros(2, 8)
    apply_token_mask(logits, make_sampling([{}] * 2, 8))
    assert not logits.any()


def test_a_row_of_which_nothing_is_left_is_uniform_over_what_is_allowed() -> None:
    logits = torch.full((2, 40), -torch.inf)
    logits[:, 5] = 3.0
    sampling = make_sampling([{}] * 2, 40)
    sampling.mask, sampling.mask_rows = token_mask([[7, 33], [5, 33]], 40), torch.tensor([0, 1])
    apply_token_mask(logits, sampling)
    assert logits[0].softmax(-1)[[7, 33]].tolist() == [0.5, 0.5]
    assert logits[1].isfinite().nonzero().flatten().tolist() == [5]


@pytest.mark.gpu
def test_the_device_does_the_same() -> None:
    logits = torch.randn(6, 1003, generator=torch.Generator().manual_seed(2))
    sampling = make_sampling([{}] * 6, 1003)
    allowed = [list(range(row, 1003, 7 + row)) for row in range(4)]
    sampling.mask, sampling.mask_rows = token_mask(allowed, 1003), torch.tensor([5, 0, 3, 2])
    device = logits.cuda()
    apply_token_mask(logits, sampling)
    sampling.mask, sampling.mask_rows = sampling.mask.cuda(), sampling.mask_rows.cuda()
    apply_token_mask(device, sampling)
    assert bool((device.cpu() == logits).all())
