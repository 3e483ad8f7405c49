"""allowed_token_ids: nothing else may come, and what may is as likely as before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.logits_processor import LogitsProcessorContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampling import Grammar, SamplingParams, SamplingRow
from pegboard.plugins.logits_custom.allowed_token_ids import AllowedTokenIds

VOCAB = 16


@pytest.fixture
def processor() -> AllowedTokenIds:
    return AllowedTokenIds(NoOptions(), LogitsProcessorContext(VOCAB, torch.device("cpu"), frozenset({3}), None))


def asking(*ids: int, others: dict[str, Any] | None = None, **more: Any) -> SamplingParams:
    return SamplingParams(extra={"allowed_token_ids": {"ids": list(ids)}, **(others or {})}, **more)


def changed(processor: AllowedTokenIds, *params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    nothing = np.array([], dtype=np.int64)
    logits = torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(1))
    after = logits.clone()
    state = processor.prepare([SamplingRow(one, nothing, nothing) for one in params])
    assert state is not None
    processor.apply(after, state)
    return logits, after


def test_all_others_have_minus_infinity_and_these_what_they_had(processor: AllowedTokenIds) -> None:
    before, after = changed(processor, SamplingParams(), asking(5, 0, 5), asking(VOCAB - 1))
    for row, ids in ((0, set(range(VOCAB))), (1, {0, 5}), (2, {VOCAB - 1})):
        for token in range(VOCAB):
            assert after[row, token] == (before[row, token] if token in ids else -torch.inf)


@pytest.mark.parametrize(
    "more",
    [{"grammar": Grammar("regex", "a")}, {"min_new_tokens": 2}, {"others": {"bad_words": {"words": ["a"]}}}],
    ids=["grammar", "min_new_tokens", "bad_words"],
)
def test_where_others_may_forbid_them_some_token_is_left(processor: AllowedTokenIds, more: dict[str, Any]) -> None:
    """Any other is taken only where nothing else is left: its probability is zero while one of the list has one."""
    _, after = changed(processor, asking(5, **more))
    assert after.isfinite().all()
    assert after.softmax(-1)[0, 5] == 1.0
    after[0, 5] = -torch.inf
    assert after.softmax(-1).isfinite().all()


def test_ids_beyond_the_vocabulary_are_refused(processor: AllowedTokenIds) -> None:
    assert processor.wants(asking(VOCAB - 1))
    refusal = rf"{VOCAB} is not a token id of this model \(0 to {VOCAB - 1}\)"
    with pytest.raises(InvalidRequest, match=refusal) as caught:
        processor.wants(asking(1, VOCAB))
    assert caught.value.param == "custom_params.allowed_token_ids.ids"
