"""The request's parameter; the distribution is the suite's to test, against the oracle of our conformance class."""

import numpy as np
import torch
from pegboard.conformance.sampler import make_sampling
from pegboard.core.interfaces import SamplerContext, SamplingParams, SamplingRow
from pegboard.toolkit.sampling.logit_pairs import LAST_RESORT

from pegboard_example_plugin.options import TopNSigmaOptions
from pegboard_example_plugin.top_n_sigma import TopNSigma, spread

VOCAB = 50


def drawn(*said: float | None) -> list[set[int]]:
    """The tokens that rows with these parameters draw in 200 steps, of the logits 0, 0.1, 0.2..."""
    sampler = TopNSigma(TopNSigmaOptions(n=0.5), SamplerContext(VOCAB, torch.device("cpu")))
    none = np.array([], dtype=np.int64)
    params = [SamplingParams(extra={"top_n_sigma": {"n": n}} if n else {}) for n in said]
    found: list[set[int]] = [set() for _ in said]
    for step in range(200):
        batch = make_sampling([{"temperature": 5.0, "seed": 1, "step": step}] * len(said), VOCAB)
        batch.rows = [SamplingRow(one, none, none) for one in params] if any(said) else ()
        for row, token in enumerate(sampler.sample(torch.arange(VOCAB).expand(len(said), -1) / 10.0, batch).tolist()):
            found[row].add(token)
    return found


def test_a_request_says_its_own_n() -> None:
    narrow, plain, wide = drawn(0.001, None, 10.0)
    assert narrow == {VOCAB - 1}
    # The deviation of 0 to 49 is 14.4: half of it leaves the eight largest.
    assert plain == set(range(VOCAB - 8, VOCAB))
    assert len(wide) > 30


def test_without_parameters_there_are_no_rows() -> None:
    assert drawn(None) == drawn(0.001, None)[1:]


def test_forbidden_tokens_do_not_count() -> None:
    values = torch.tensor([[1.0, 3.0, -torch.inf, LAST_RESORT], [LAST_RESORT] * 4], dtype=torch.float64)
    assert spread(values).tolist() == [[1.0], [0.0]]
