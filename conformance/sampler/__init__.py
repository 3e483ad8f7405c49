"""The conformance suite of Sampler."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.properties import properties
from pegboard.conformance.sampler.params import SamplerParams
from pegboard.conformance.sampler.waiting import SamplerWaiting
from pegboard.conformance.suite import capability
from pegboard.core.interfaces.sampler import NO_TOKEN, Sampler, SamplerContext
from pegboard.core.interfaces.sampling import SAMPLING_ROW, LogprobRequest, SamplingBatch, SamplingParams
from pegboard.toolkit.sampling.logit_pairs import LAST_RESORT

if TYPE_CHECKING:
    from numpy.typing import NDArray

Row = Mapping[str, Any]

DRAWS = 4000
"""Draws per distribution: enough to tell 2% of the mass from 4%."""

P_VALUE = 1e-6
"""What a chi-square test must exceed: a right sampler falls below it once in a million runs."""


def make_sampling(
    rows: Sequence[Row], vocab: int, *, logprobs: Sequence[LogprobRequest | None] = (), device: str = "cpu"
) -> SamplingBatch:
    """Return a SamplingBatch of rows such as ``{"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 3, "step": 0}``.

    The keys are those of SamplingParams, and `step`. What a row leaves out is off; it is greedy without a temperature.
    """

    numbers = [
        SamplingParams(**{"temperature": 0.0, **{key: value for key, value in row.items() if key != "step"}}).row(
            row.get("seed", 0), vocab
        )
        for row in rows
    ]
    steps = np.array([row.get("step", 0) for row in rows], np.int64)

    def tensor(array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    batch = SamplingBatch.of(np.array(numbers, list(SAMPLING_ROW)), tensor(steps), vocab, tensor)
    batch.logprobs = tuple(logprobs)
    return batch


def exact_probabilities(logits: NDArray[np.floating[Any]], row: Row) -> NDArray[np.float64]:
    """Return the distribution that a row is to be drawn from, in float64: each filter on what the one before it left.

    No two logits may be equal where a filter cuts, since the contract does not say which of them stays.
    """
    scaled = logits.astype(np.float64) / row["temperature"]
    p = np.exp(scaled - scaled.max())
    order = np.argsort(-p, kind="stable")
    p[order[row.get("top_k", len(p)) :]] = 0.0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= row.get("top_p", 1.0)]] = 0.0
    p[p < row.get("min_p", 0.0) * p.max()] = 0.0
    return np.asarray(p / p.sum())


def chi_square(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    """p-value of Pearson's test that `counts` were drawn from `probabilities`; 0.0 where the impossible happened.

    Rare outcomes are put together until each bin expects at least five.
    """
    if counts[probabilities == 0].any():
        return 0.0
    order = np.argsort(-probabilities, kind="stable")
    expected, found = probabilities[order] * counts.sum(), counts[order]
    bins = (np.cumsum(expected) // 5).astype(np.int64)
    _, bins = np.unique(bins, return_inverse=True)
    expected, observed = np.bincount(bins, expected), np.bincount(bins, found)
    if len(expected) > 1 and expected[-1] < 5:
        expected = np.append(expected[:-2], expected[-2:].sum())
        observed = np.append(observed[:-2], observed[-2:].sum())
    if len(expected) < 2:
        return 1.0
    statistic = float(((observed - expected) ** 2 / expected).sum())
    half = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


_SMALL = np.log([0.28, 0.2, 0.15, 0.11, 0.09, 0.07, 0.05, 0.03, 0.0125, 0.0075])[[3, 9, 0, 6, 1, 8, 4, 2, 7, 5]]
_SMALL = _SMALL.astype(np.float32) + 3.0

CASES: dict[str, Row] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 3": {"temperature": 3.0},
    "top_k 3": {"temperature": 1.0, "top_k": 3},
    "top_k of all but one": {"temperature": 1.0, "top_k": 9},
    "top_p 0.6": {"temperature": 1.0, "top_p": 0.6},
    "top_p 0.985": {"temperature": 1.0, "top_p": 0.985},
    "min_p 0.2": {"temperature": 1.0, "min_p": 0.2},
    "min_p 1": {"temperature": 1.0, "min_p": 1.0},
    "top_k then top_p": {"temperature": 1.0, "top_k": 5, "top_p": 0.7},
    "top_k then min_p": {"temperature": 1.0, "top_k": 6, "min_p": 0.5},
    "top_p then min_p": {"temperature": 1.0, "top_p": 0.9, "min_p": 0.35},
    "all four": {"temperature": 1.7, "top_k": 8, "top_p": 0.9, "min_p": 0.3},
    "all four, cold": {"temperature": 0.6, "top_k": 8, "top_p": 0.9, "min_p": 0.1},
}
"""Cuts are well away from the cumulated probabilities, so rounding moves none."""

LARGE_CASES: dict[str, Row] = {
    "temperature": {"temperature": 1.0},
    "top_k 50": {"temperature": 1.0, "top_k": 50},
    "top_k 1500": {"temperature": 1.0, "top_k": 1500},
    "top_p, a narrow nucleus": {"temperature": 0.4, "top_p": 0.9},
    "top_p, a wide nucleus": {"temperature": 2.0, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "all four": {"temperature": 1.2, "top_k": 600, "top_p": 0.9, "min_p": 0.02},
}

ROUNDED_CASES: dict[str, Row] = {
    name: LARGE_CASES[name] for name in ("temperature", "top_k 1500", "top_p, a narrow nucleus", "all four")
}

ROUNDING = 0.02
"""Standard deviation of what a batch of another size changes in the logits of a small model in bfloat16."""

MAY_CHANGE = 0.05
"""Share of draws that rounding may change; with noise for each token id it is below 0.03 in all of these cases."""

SEEDS = (0, 1, 2, -1, 12345, 2**63 - 1, -(2**63), 2**32, 2**31)


def _row(index: int) -> Row:
    """Return a mixture of parameters for batch tests."""
    cases: list[Row] = [{}, *CASES.values(), {"temperature": 1.0, "top_k": 1}, *LARGE_CASES.values()]
    return {**cases[index % len(cases)], "seed": SEEDS[index % len(SEEDS)] ^ index, "step": index * 7 % 11}


class SamplerContract(SamplerParams, SamplerWaiting):
    """What every sampler owes the runner. An author names the provider, and nothing else; the author of a sampler with
    another distribution says in `probabilities` which.

    A sampler that is not seeded is tested with draws of its own, so its distributions may fail once in a million runs.
    """

    contract = "sampler"

    draws = DRAWS
    """How many tokens a distribution is judged by: fewer for a sampler that is slow, and may then be wrong by more."""

    def sampler(self, vocab: int) -> Sampler:
        sampler: Sampler = self.build(SamplerContext(vocab_size=vocab, device=torch.device("cpu")))
        return sampler

    def draw(self, logits: NDArray[np.floating[Any]] | torch.Tensor, rows: Sequence[Row], least: int = 0) -> list[int]:
        """Return one token per row; `logits` [rows, vocab], or [vocab] for the same in every row. `least` is the
        smallest number that a token may be.
        """
        table = torch.as_tensor(logits, dtype=torch.float32).clone()
        table = table.expand(len(rows), -1).clone() if table.dim() == 1 else table
        tokens = self.sampler(table.shape[1]).sample(table, make_sampling(rows, table.shape[1]))
        assert isinstance(tokens, torch.Tensor), f"sample() must return a tensor, not {type(tokens).__name__}"
        assert tokens.dtype == torch.int64, f"tokens are {tokens.dtype}, not int64"
        assert tokens.shape == (len(rows),), f"tokens have shape {tuple(tokens.shape)}, not ({len(rows)},): one per row"
        found = [int(token) for token in tokens.tolist()]
        outside = [(row, token) for row, token in enumerate(found) if not least <= token < table.shape[1]]
        assert not outside, f"(row, token) {outside[:8]} are outside the vocabulary of {table.shape[1]}"
        return found

    def count(self, logits: NDArray[np.floating[Any]], rows: Sequence[Row]) -> NDArray[np.int64]:
        """Return how often each token was drawn by these rows of equal logits, in batches of bounded memory."""
        step = max(1, 4_000_000 // len(logits))
        tokens = [token for at in range(0, len(rows), step) for token in self.draw(logits, rows[at : at + step])]
        return np.bincount(tokens, minlength=len(logits))

    def probabilities(self, logits: NDArray[np.floating[Any]], row: Row) -> NDArray[np.float64]:
        """float64 [vocab]: how likely each token is to be drawn, from `logits` [vocab] and a sampled row's parameters.

        Override this for a sampler of another distribution; by default the four filters, in the contract's order. Rows
        with temperature 0 are greedy in any case, and their tests never ask.
        """
        return exact_probabilities(logits, row)

    def expected(self, logits: NDArray[np.floating[Any]], row: Row) -> NDArray[np.float64]:
        """`probabilities`, which must be some."""
        p = np.asarray(self.probabilities(logits.copy(), row), dtype=np.float64)
        assert p.shape == logits.shape, f"probabilities() has shape {p.shape} for {logits.shape} logits"
        assert (p >= 0).all(), "probabilities() has negative ones"
        assert abs(p.sum() - 1) < 1e-6, f"probabilities() sums up to {p.sum():g}"
        assert not p[np.isneginf(logits)].any(), "probabilities() allows tokens whose logit is minus infinity"
        return p

    def allowed(self, logits: NDArray[np.floating[Any]], row: Row) -> set[int]:
        """Return tokens that may be drawn. Which of equal logits a cut leaves is open, so all of them may."""
        return set(np.flatnonzero(np.isin(logits, logits[self.expected(logits, row) > 0])).tolist())

    def check_distribution(self, logits: NDArray[np.floating[Any]], row: Row, share: float = 1.0) -> None:
        """Compare `share` of `draws` tokens with what is expected."""
        __tracebackhide__ = True
        draws = int(share * self.draws)
        counts = self.count(logits, [{**row, "seed": seed, "step": seed % 5} for seed in range(draws)])
        exact = self.expected(logits, row)
        impossible = np.flatnonzero((exact == 0) & (counts > 0))
        assert not impossible.size, f"{row} rules out tokens {impossible[:8]}, drawn {counts[impossible][:8]} times"
        p = chi_square(counts, exact)
        assert p > P_VALUE, f"{row}: p = {p:.2g}; of {draws} drew {counts[:12]}, expected {(exact * draws)[:12]}"

    # Greedy rows.

    @pytest.mark.parametrize("vocab", [4, 320, 5000])
    def test_greedy_takes_the_first_maximum(self, vocab: int) -> None:
        logits = torch.full((6, vocab), -3.0)
        for row, places in enumerate([(0,), (vocab - 1,), (1, vocab - 1), (0, 1, 2), (2, 3), (vocab // 2, vocab - 1)]):
            logits[row, list(places)] = 2.5
        expected = [0, vocab - 1, 1, 0, 2, vocab // 2]
        assert self.draw(logits, [{}] * 6) == expected
        mixed = self.draw(torch.cat([logits, logits]), [{}] * 6 + [{"temperature": 1.0, "seed": s} for s in range(6)])
        assert mixed[:6] == expected, "greedy rows change beside sampled ones"

    def test_greedy_ignores_the_other_parameters(self) -> None:
        rows: list[Row] = [{"top_p": 0.1}, {"top_k": 3}, {"min_p": 0.9}, {"seed": 5, "step": 9}]
        assert self.draw(_SMALL, rows) == [2] * 4
        assert self.draw(_SMALL, [*rows, {"temperature": 100.0}])[:4] == [2] * 4

    def test_greedy_rows_are_untouched_by_their_neighbours(self) -> None:
        generator = torch.Generator().manual_seed(1)
        logits = torch.randn(24, 700, generator=generator)
        rows = [{} if index % 3 == 0 else _row(index) for index in range(24)]
        tokens = self.draw(logits, rows)
        assert tokens[::3] == logits.argmax(-1).tolist()[::3]

    # Distributions.

    @pytest.mark.parametrize("case", CASES)
    def test_distribution(self, case: str) -> None:
        self.check_distribution(_SMALL, CASES[case])

    @pytest.mark.parametrize("case", LARGE_CASES)
    def test_distribution_over_a_large_vocabulary(self, case: str) -> None:
        logits = np.random.default_rng(3).normal(0.0, 1.5, 6000).astype(np.float32)
        self.check_distribution(logits, LARGE_CASES[case], share=0.75)

    def test_distribution_of_a_mixed_batch(self) -> None:
        """Rows of every kind side by side keep their own parameters."""
        kinds = list(CASES.values())
        rows = [{**kinds[i % len(kinds)], "seed": i, "step": 1} for i in range(self.draws // 4 * len(kinds))]
        tokens = np.array(self.draw(_SMALL, rows))
        for index, kind in enumerate(kinds):
            counts = np.bincount(tokens[index :: len(kinds)], minlength=len(_SMALL))
            p = chi_square(counts, self.expected(_SMALL, kind))
            assert p > P_VALUE, f"{kind}: p = {p:.2g} in a mixed batch; drew {counts}"

    def test_uniform_logits(self) -> None:
        """Every token is equally likely, the first and the last one too."""
        self.check_distribution(np.zeros(40, dtype=np.float32), {"temperature": 1.0})
        self.check_distribution(np.zeros(600, dtype=np.float32), {"temperature": 0.3}, share=3.0)

    # Edges.

    @pytest.mark.parametrize("row", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}], ids=str)
    def test_filters_that_leave_one_token(self, row: Row) -> None:
        row = {"temperature": 1.0, **row}
        drawn = set(self.draw(_SMALL, [{**row, "seed": seed} for seed in range(200)]))
        assert drawn <= self.allowed(_SMALL, row), f"{row} leaves {self.allowed(_SMALL, row)}, drawn: {drawn}"

    def test_filters_that_leave_everything(self) -> None:
        row = {"temperature": 1.0, "top_k": len(_SMALL), "top_p": 1.0, "min_p": 0.0}
        self.check_distribution(_SMALL, row)

    @pytest.mark.parametrize("row", [{"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.5}, {"top_k": 3, "top_p": 0.9}], ids=str)
    @pytest.mark.parametrize("vocab", [8, 3000])
    def test_ties_at_a_cut(self, row: Row, vocab: int) -> None:
        """Which of equal logits stay is open; a smaller one never does."""
        logits = np.full(vocab, -9.0, dtype=np.float32)
        tied = [1, 3, 4, vocab - 1]
        logits[tied] = 4.0
        row = {"temperature": 1.0, **row}
        tokens = self.draw(logits, [{**row, "seed": seed} for seed in range(300)])
        allowed = self.allowed(logits, row)
        assert set(tokens) <= allowed, f"{row} leaves {sorted(allowed)[:8]} at most, drawn: {sorted(set(tokens))[:8]}"
        if self.expected(logits, row).max() < 0.9:
            assert len(set(tokens)) > 1, "of several tokens that stay only one is ever drawn"

    @pytest.mark.parametrize("case", CASES)
    def test_forbidden_tokens_are_never_drawn(self, case: str) -> None:
        logits = _SMALL.copy()
        logits[[0, 2, 5]] = -math.inf
        tokens = self.draw(logits, [{**CASES[case], "seed": seed} for seed in range(500)])
        assert not {0, 2, 5} & set(tokens)

    @pytest.mark.parametrize("case", CASES)
    def test_last_resorts_are_as_good_as_forbidden(self, case: str) -> None:
        """Beside a grammar, processors give that to what they forbid. It is drawn where nothing else is left."""
        row, places = CASES[case], [0, 2, 5]
        logits, resort = _SMALL.copy(), _SMALL.copy()
        logits[places], resort[places] = -math.inf, LAST_RESORT
        counts = self.count(resort, [{**row, "seed": seed} for seed in range(1000)])
        p = chi_square(counts, self.expected(logits, row))
        assert p > P_VALUE, f"{row}: p = {p:.2g} where tokens {places} have LAST_RESORT: drew {counts}"
        nothing_else = np.full(len(_SMALL), -math.inf, dtype=np.float32)
        nothing_else[3] = LAST_RESORT
        assert self.draw(nothing_else, [row, {}]) == [3, 3]

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("vocab", [5, 1000])
    def test_one_finite_logit(self, case: str, vocab: int) -> None:
        logits = torch.full((vocab, vocab), -math.inf)
        logits.fill_diagonal_(-2.0)
        some = list(range(0, vocab, max(1, vocab // 20)))
        assert self.draw(logits[some], [{**CASES[case], "seed": seed} for seed in some]) == some

    @pytest.mark.parametrize("case", CASES)
    def test_huge_logits(self, case: str) -> None:
        """No overflow: 1e30 apart, one token has all the mass."""
        logits = np.array([-1e30, 3e30, 1e30, 2e30, 0.0, -3e38, 1e-30, -1.0, 1.0, -math.inf], dtype=np.float32)
        drawn = set(self.draw(logits, [{**CASES[case], "seed": seed} for seed in range(50)]))
        assert drawn <= self.allowed(logits, CASES[case]), f"drawn: {drawn}"

    @pytest.mark.parametrize("shift", [-1e4, 1e4])
    def test_only_differences_matter(self, shift: float) -> None:
        logits = np.round(_SMALL * 8) / 8
        self.check_distribution((logits + shift).astype(np.float32), {"temperature": 1.0})

    @pytest.mark.parametrize("row", [{}, {"temperature": 1.0}, {"temperature": 0.5, "top_k": 2, "top_p": 0.5}], ids=str)
    @pytest.mark.parametrize("bad", [0, 2, 3])
    def test_a_row_without_a_finite_logit_gets_no_token(self, row: Row, bad: int) -> None:
        logits = torch.zeros(4, 64)
        logits[:, 7] = 50.0
        for value in (-math.inf, math.nan):
            logits[bad] = value
            tokens = self.draw(logits, [{**row, "seed": index} for index in range(4)], least=NO_TOKEN)
            assert tokens[bad] == NO_TOKEN, f"a row of {value} gets {NO_TOKEN}, and nothing is raised"
            assert [token for index, token in enumerate(tokens) if index != bad] == [7] * 3, (
                "the other rows get what they would have got"
            )

    # Seeds.

    @capability("seeded")
    @properties(max_examples=40)
    @given(
        order=st.permutations(range(24)),
        size=st.integers(1, 24),
        vocab=st.sampled_from([10, 300, 2000]),
        coarse=st.booleans(),
    )
    def test_a_draw_does_not_depend_on_the_batch(self, order: list[int], size: int, vocab: int, coarse: bool) -> None:
        """Any part of a batch, in any order, draws the same tokens; also with the many ties of bf16 logits."""
        logits = torch.randn(24, vocab, generator=torch.Generator().manual_seed(vocab)) * 2
        if coarse:
            logits = logits.to(torch.bfloat16).to(torch.float32)
        rows = [_row(index) for index in range(24)]
        together = self.draw(logits, rows)
        some = order[:size]
        assert self.draw(logits[some], [rows[index] for index in some]) == [together[index] for index in some]

    @capability("seeded")
    def test_a_draw_does_not_depend_on_what_was_drawn_before(self) -> None:
        sampler = self.sampler(len(_SMALL))
        rows = [{"temperature": 2.0, "seed": seed, "step": 3} for seed in range(100)]
        logits = torch.from_numpy(_SMALL).expand(100, -1)
        first, second = (sampler.sample(logits.clone(), make_sampling(rows, len(_SMALL))).tolist() for _ in range(2))
        assert first == second

    @capability("seeded")
    @pytest.mark.parametrize("seed", SEEDS)
    def test_the_steps_of_one_seed_follow_the_distribution(self, seed: int) -> None:
        row: Row = {"temperature": 1.0, "seed": seed}
        counts = self.count(_SMALL, [{**row, "step": step} for step in range(2000)])
        assert chi_square(counts, self.expected(_SMALL, row)) > P_VALUE, f"seed {seed} drew {counts}"

    @capability("seeded")
    @pytest.mark.parametrize("apart", [(0, 1), (1, 0), (1, -1), (1, 1), (2**32, 0), (0, 2)], ids=str)
    def test_neighbouring_seeds_and_steps_are_independent(self, apart: tuple[int, int]) -> None:
        """Pairs of draws, one with the seed and step of the other moved by `apart`. All 16 pairs of equal logits come
        equally often.
        """
        here = [{"temperature": 1.0, "seed": seed, "step": step} for seed in range(60) for step in range(1, 61)]
        there = [{**row, "seed": row["seed"] + apart[0], "step": row["step"] + apart[1]} for row in here]
        logits = np.zeros(4, dtype=np.float32)
        first, second = np.array(self.draw(logits, here)), np.array(self.draw(logits, there))
        counts = np.bincount(first * 4 + second, minlength=16)
        single = self.expected(logits, {"temperature": 1.0})
        assert chi_square(counts, np.outer(single, single).ravel()) > P_VALUE, f"pairs {apart} apart: {counts}"

    @capability("seeded")
    @pytest.mark.parametrize("case", ROUNDED_CASES)
    def test_rounding_of_the_logits_seldom_changes_a_draw(self, case: str) -> None:
        """A forward pass in bfloat16 rounds logits differently in a batch of another size.

        Noise for each token id changes one draw in a hundred, or three, then. One number for the whole row, looked
        up in the cumulated probabilities, changes many more, since each border moves with all before it.
        """
        row, vocab = ROUNDED_CASES[case], 2000
        generator = torch.Generator().manual_seed(6)
        logits = (torch.randn(vocab, generator=generator) * 1.5).expand(1000, -1)
        rounded = logits + torch.randn(logits.shape, generator=generator) * ROUNDING
        rows = [{**row, "seed": seed, "step": seed % 7} for seed in range(len(logits))]
        changed = sum(a != b for a, b in zip(self.draw(logits, rows), self.draw(rounded, rows), strict=True))
        most = MAY_CHANGE
        if changed >= most * len(rows):
            # A distribution with a cut of its own may itself change more than others.
            here = self.expected(logits[0].numpy(), row)
            apart = [np.abs(self.expected(there, row) - here).sum() / 2 for there in rounded.numpy()]
            most = max(most, 2 * float(np.mean(apart)))
        assert changed < most * len(rows), f"{row}: {changed} of {len(rows)} draws change when logits are rounded"

    def test_draws_vary(self) -> None:
        rows = [{"temperature": 1.0, "seed": 4, "step": step} for step in range(64)]
        assert len(set(self.draw(np.zeros(1000, dtype=np.float32), rows))) > 32

    # Logprobs.

    def check_logprobs(self, logits: torch.Tensor, tokens: list[int], wants: Sequence[LogprobRequest | None]) -> None:
        """Against log_softmax in float64. A float32 sum of n masses is off by up to 2 sqrt(n) 2^-24 of itself, 9e-6 for
        the 5000 of these tests; each mass by 1e-6 for logits of about 10; and the result by its rounding, 1e-6.
        """
        exact = logits.to(torch.float64).log_softmax(-1)
        vocab, before = logits.shape[1], logits.clone()
        rows: list[Row] = [{"temperature": 0.3, "top_k": 2, "seed": row} for row in range(len(tokens))]
        batch = make_sampling(rows, vocab, logprobs=wants)
        output = self.sampler(vocab).logprobs(logits, torch.tensor(tokens), batch)
        assert torch.equal(logits, before), "logprobs() changed the logits"
        assert output.token_logprobs.dtype == torch.float32
        expected = exact[torch.arange(len(tokens)), torch.tensor(tokens)].to(torch.float32)
        torch.testing.assert_close(output.token_logprobs, expected, rtol=1e-5, atol=1e-5)
        self._check_tops(output.top_values, output.top_ids, exact, wants)
        asked = {row: want.token_ids for row, want in enumerate(wants) if want is not None and want.token_ids}
        assert set(output.chosen) == set(asked)
        for row, ids in asked.items():
            expected = exact[row, list(ids)].to(torch.float32)
            torch.testing.assert_close(output.chosen[row], expected, rtol=1e-5, atol=1e-5)

    def _check_tops(
        self,
        values: torch.Tensor | None,
        ids: torch.Tensor | None,
        exact: torch.Tensor,
        wants: Sequence[LogprobRequest | None],
    ) -> None:
        width = max((want.top for want in wants if want is not None), default=0)
        if width == 0:
            assert values is None
            assert ids is None
            return
        assert values is not None
        assert ids is not None
        assert values.shape == ids.shape == (len(exact), width)
        for row, want in enumerate(wants):
            top = 0 if want is None else want.top
            expected = exact[row].topk(top).values.to(torch.float32)
            torch.testing.assert_close(values[row, :top], expected, rtol=1e-5, atol=1e-5)
            own = exact[row, ids[row, :top]].to(torch.float32)
            torch.testing.assert_close(values[row, :top], own, rtol=1e-5, atol=1e-5)
            assert len(set(ids[row, :top].tolist())) == top, "a token stands twice among the top ones"

    @pytest.mark.parametrize("vocab", [10, 5000])
    def test_logprobs_of_the_tokens(self, vocab: int) -> None:
        logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(2)) * 4
        tokens = [0, vocab - 1, 3, *logits[3:].argmax(-1).tolist()]
        self.check_logprobs(logits, tokens, [LogprobRequest()] * 6)
        self.check_logprobs(logits, tokens, ())

    @pytest.mark.parametrize("vocab", [10, 5000])
    def test_top_and_chosen_logprobs(self, vocab: int) -> None:
        logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(3)) * 4
        wants = [LogprobRequest(top=2), None, LogprobRequest(top=7), LogprobRequest(token_ids=(9, 1, 1))]
        wants.append(LogprobRequest(top=1, token_ids=(0,)))
        self.check_logprobs(logits, [1, 2, 3, 4, 5], wants)
        self.check_logprobs(logits, [1, 2, 3, 4, 5], [None, None, LogprobRequest(token_ids=(4,)), None, None])

    def test_logprobs_of_forbidden_tokens(self) -> None:
        logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(4))
        logits[:, 10:] = -math.inf
        self.check_logprobs(logits, [3, 20, 0], [LogprobRequest(top=5), LogprobRequest(token_ids=(2, 30)), None])

    def test_logprobs_of_huge_logits(self) -> None:
        logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(5)) + torch.tensor([[5e3], [-5e3], [0.0]])
        self.check_logprobs(logits.round(decimals=1), [3, 20, 0], [LogprobRequest(top=5)] * 3)
