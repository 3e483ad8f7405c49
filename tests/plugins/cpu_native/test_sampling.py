"""Each token is the right one: against a float64 reference that sorts, with every instruction set, and beside the torch
sampler with the same seeds.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from pegboard.conformance.sampler import P_VALUE, chi_square, exact_probabilities, make_sampling
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampler import NO_TOKEN, SamplerContext
from pegboard.core.interfaces.sampling import LogprobRequest
from pegboard.plugins.cpu_native import sampler as module
from pegboard.plugins.cpu_native.library import NativeError
from pegboard.plugins.cpu_native.options import CpuNativeSamplerOptions
from pegboard.plugins.cpu_native.sampler import CpuNativeSampler
from pegboard.plugins.sampler_torch.sampler import TorchSampler
from tests.plugins.cpu_native.instruction_sets import EACH
from tests.plugins.cpu_native.sampling_reference import choices
from tests.plugins.sampler_torch.noise_reference import bits, noise

CPU = torch.device("cpu")


def make(vocab: int, instructions: str = "auto", threads: int = 2) -> CpuNativeSampler:
    options = CpuNativeSamplerOptions(instructions=instructions, threads=threads)  # type: ignore[arg-type]
    return CpuNativeSampler(options, SamplerContext(vocab, CPU))


def draw(logits: torch.Tensor, rows: list[dict[str, Any]], **options: Any) -> list[int]:
    vocab = logits.shape[1]
    return [int(one) for one in make(vocab, **options).sample(logits.clone(), make_sampling(rows, vocab))]


def table(kind: str, rows: int, vocab: int, seed: int = 1) -> torch.Tensor:
    """Logits of a kind."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    places = torch.arange(vocab)
    if kind == "wide":
        return logits
    if kind == "flat":
        return torch.full((rows, vocab), 2.5)
    if kind == "nearly flat":
        return logits * 1e-3
    if kind == "steep":
        return logits * 9
    if kind == "ties":
        return (logits * 4).round() / 2
    if kind == "bf16":
        return (logits * 3).to(torch.bfloat16).float()
    if kind == "signed zeros":
        return torch.where(logits > 1, 0.0, torch.where(logits > 0, -0.0, logits))
    if kind == "few left":
        return logits.masked_fill(places % 37 != 5 % vocab, -torch.inf)
    if kind == "one left":
        return logits.masked_fill(places != vocab - 1, -torch.inf)
    if kind == "a cluster":  # the largest stand side by side, in one chunk
        return logits + 9.0 * ((places >= vocab // 2) & (places < vocab // 2 + 60))
    if kind == "huge":
        return logits * 1e37
    if kind == "infinite":
        return logits.masked_fill((places % 97 == 3 % vocab) & (places > 0), torch.inf)
    assert kind == "descending"
    return (-places * 0.01).expand(rows, vocab).contiguous()


KINDS = (
    *("wide", "flat", "nearly flat", "steep", "ties", "bf16", "signed zeros", "few left", "one left"),
    *("a cluster", "huge", "infinite", "descending"),
)


def parameters(count: int, vocab: int, seed: int) -> list[dict[str, Any]]:
    """Rows of parameters of all kinds."""
    pick = np.random.default_rng(seed)

    def one(index: int) -> dict[str, Any]:
        row: dict[str, Any] = {
            "temperature": float(pick.choice([0.0, 1e-40, 1e-4, 0.3, 1.0, 1.0, 1.7, 100.0])),
            "seed": int(pick.integers(-(2**63), 2**63 - 1)),
            "step": index % 7,
        }
        if pick.random() < 0.5:
            row["top_k"] = int(
                pick.choice([1, 2, 5, 50, 200, 300, 1000, 1024, 1025, 2000, vocab - 1, vocab, vocab + 9])
            )
            row["top_k"] = max(row["top_k"], 1)
        if pick.random() < 0.6:
            row["top_p"] = float(pick.choice([1e-6, 0.05, 0.3, 0.5, 0.9, 0.99, 0.999999]))
        if pick.random() < 0.3:
            row["min_p"] = float(pick.choice([1e-6, 0.05, 0.4, 1.0]))
        return row

    return [one(index) for index in range(count)]


@pytest.mark.parametrize("vocab", [1, 17, 256, 257, 1000, 5003])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EACH)
def test_every_token_is_the_right_one(kind: str, vocab: int, name: str) -> None:
    logits = table(kind, 30, vocab)
    rows = parameters(30, vocab, seed=vocab + len(kind))
    for index, (token, row) in enumerate(zip(draw(logits, rows, instructions=name), rows, strict=True)):
        right = choices(logits[index].numpy(), row)
        assert token in right, f"row {index} of {kind} logits, {row}: {token}, not one of {sorted(right)[:9]}"


@pytest.mark.full
@pytest.mark.parametrize("vocab", [49_152, 49_163])
@pytest.mark.parametrize("kind", KINDS)
def test_every_token_of_a_large_vocabulary_is_the_right_one(kind: str, vocab: int) -> None:
    logits = table(kind, 40, vocab, seed=3)
    rows = parameters(40, vocab, seed=5 + len(kind))
    for index, (token, row) in enumerate(zip(draw(logits, rows), rows, strict=True)):
        right = choices(logits[index].numpy(), row)
        assert token in right, f"row {index} of {kind} logits, {row}: {token}, not one of {sorted(right)[:9]}"


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("kind", ["wide", "bf16", "steep", "few left"])
def test_another_sampler_another_set_and_other_threads_draw_the_same(kind: str, name: str) -> None:
    """But for a token upon the border of a filter, which rounding may put on either side: sums in float32 differ by
    machine and by build of torch.
    """
    vocab, count = 6007, 250
    logits = table(kind, count, vocab, seed=8)
    rows = parameters(count, vocab, seed=9)
    torchs = TorchSampler(NoOptions(), SamplerContext(vocab, CPU)).sample(logits.clone(), make_sampling(rows, vocab))
    for threads in (1, 3):
        tokens = draw(logits, rows, instructions=name, threads=threads)
        for index in (torch.tensor(tokens) != torchs).nonzero().flatten().tolist():
            both = {tokens[index], int(torchs[index])}
            assert both <= choices(logits[index].numpy(), rows[index]), f"{name}, {threads} threads, row {index}"


def test_any_part_of_a_batch_in_any_order_draws_the_same() -> None:
    vocab, count = 3001, 64
    logits, rows = table("bf16", count, vocab), parameters(count, vocab, seed=4)
    together = draw(logits, rows)
    for seed in range(5):
        some = np.random.default_rng(seed).permutation(count)[: 1 + seed * 15].tolist()
        assert draw(logits[some], [rows[index] for index in some]) == [together[index] for index in some]


@pytest.mark.parametrize(
    "row", [{}, {"top_p": 0.7}, {"top_k": 1500}, {"top_k": 1500, "top_p": 0.6, "min_p": 0.2}], ids=str
)
def test_distribution_of_long_heads(row: dict[str, Any]) -> None:
    """With the ways that are taken only where many tokens are left."""
    vocab, draws = 4000, 4000
    logits = table("nearly flat", 1, vocab)[0] * 300
    full = {"temperature": 1.0, **row}
    tokens = draw(logits.expand(draws, -1), [{**full, "seed": seed} for seed in range(draws)])
    exact = exact_probabilities(logits.numpy(), full)
    counts = np.bincount(tokens, minlength=vocab)
    assert not counts[exact == 0].any()
    # Tokens of about the same probability together, or each bin would expect one.
    groups = np.argsort(np.argsort(-exact)) * 40 // vocab
    found, expected = (np.bincount(groups, weights=one, minlength=40) for one in (counts, exact))
    assert chi_square(found, expected) > P_VALUE  # type: ignore[arg-type]


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("top_k", [100, 2000])
def test_a_head_ends_where_the_share_is_reached(top_k: int, name: str) -> None:
    """Not behind it: of equal tokens the first half stays, in short heads and in long ones."""
    rows = [{"temperature": 1.0, "top_k": top_k, "top_p": 0.5, "seed": seed} for seed in range(50)]
    expected = [int(noise(seed, 0, np.arange(top_k // 2)).argmax()) for seed in range(50)]
    assert draw(torch.zeros(50, 4000), rows, instructions=name) == expected


@pytest.mark.parametrize("name", EACH)
def test_rows_that_cannot_be_sampled(name: str) -> None:
    """NaN anywhere, in greedy rows as well, and rows without a finite logit."""
    vocab = 1003
    for place in (0, 15, 63, 64, 500, vocab - 1):
        for row in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 4}):
            logits = table("wide", 3, vocab)
            logits[1, place] = math.nan
            tokens = draw(logits, [{**row, "seed": 1}] * 3, instructions=name)
            assert [token == NO_TOKEN for token in tokens] == [False, True, False]
    logits = table("wide", 4, vocab)
    logits[2:] = -math.inf
    for value in (-math.inf, math.inf):
        logits[2, 7] = value
        tokens = draw(logits, [{"temperature": 1.0}] * 4, instructions=name)
        assert [token == NO_TOKEN for token in tokens] == [False, False, True, True]


def test_nothing_and_odd_tensors() -> None:
    """No rows at all; rows of a larger tensor; another dtype."""
    assert draw(torch.empty(0, 50), []) == []
    whole = torch.randn(6, 200, generator=torch.Generator().manual_seed(1))
    rows = [{"temperature": 1.0, "seed": seed} for seed in range(3)]
    part = whole[::2, 20:150]
    assert not part.is_contiguous()
    sampler, batch = make(130), make_sampling(rows, 130)
    expected = sampler.sample(part.clone(), batch).tolist()
    assert sampler.sample(part, batch).tolist() == expected
    assert sampler.sample(part.t().contiguous().t(), batch).tolist() == expected
    assert sampler.sample(part.double(), batch).tolist() == expected


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("end", [-1, 1])
def test_the_rarest_noise_wins_and_loses_by_what_it_is(end: int, name: str) -> None:
    """A token that stands behind the peak by a little less, or a little more, than its noise is ahead: none is passed
    over that would have won.
    """
    vocab = 150_000
    ids, seeds = np.arange(1, vocab), range(60)
    found = [bits(seed, 0, ids) * end for seed in seeds]
    places = [1 + int(one.argmax()) for one in found]
    # The rarest of nine million numbers, and those of other rows beside it.
    assert max(one.max() for one in found) > 2**31 - 2**12
    for ahead_by, expected in ((-1e-4, [0] * len(places)), (1e-4, places)):
        logits = torch.full((len(places), vocab), -torch.inf)
        for row, (seed, place) in enumerate(zip(seeds, places, strict=True)):
            own, peak = noise(seed, 0, np.array([place, 0]))
            logits[row, 0], logits[row, place] = 0.0, peak - own + ahead_by
        rows = [{"temperature": 1.0, "seed": seed} for seed in seeds]
        assert draw(logits, rows, instructions=name) == expected


class TestLogprobs:
    def check(self, name: str, logits: torch.Tensor, wants: list[LogprobRequest | None]) -> None:
        vocab = logits.shape[1]
        exact = logits.double().log_softmax(-1)
        tokens = torch.arange(len(logits)) * 7 % vocab
        batch = make_sampling([{}] * len(logits), vocab, logprobs=wants)
        output = make(vocab, name).logprobs(logits, tokens, batch)
        expected = exact.gather(1, tokens[:, None]).squeeze(1).float()
        torch.testing.assert_close(output.token_logprobs, expected, rtol=1e-6, atol=1e-5)
        for row, want in enumerate(wants):
            if want is not None and want.top:
                assert output.top_values is not None
                assert output.top_ids is not None
                top = exact[row].sort(descending=True, stable=True)
                torch.testing.assert_close(
                    output.top_values[row, : want.top], top.values[: want.top].float(), rtol=1e-6, atol=1e-5
                )
                assert output.top_ids[row, : want.top].tolist() == top.indices[: want.top].tolist()

    @pytest.mark.parametrize("name", EACH)
    @pytest.mark.parametrize("kind", ["wide", "bf16", "flat", "few left", "one left", "huge"])
    def test_against_float64(self, name: str, kind: str) -> None:
        """Of equal ones the smaller ids stand first."""
        logits = table(kind, 5, 3003)
        self.check(name, logits, [LogprobRequest(top=20), None, LogprobRequest(top=1), LogprobRequest(top=3003), None])

    def test_more_than_there_are(self) -> None:
        output = make(3).logprobs(
            torch.zeros(1, 3), torch.tensor([1]), make_sampling([{}], 3, logprobs=[LogprobRequest(top=9)])
        )
        assert output.top_ids is not None
        assert output.top_ids.tolist() == [[0, 1, 2]]

    def test_of_infinite_logits_they_are_torchs(self) -> None:
        logits = table("infinite", 2, 500)
        output = make(500).logprobs(logits, torch.tensor([1, 2]), make_sampling([{}] * 2, 500))
        assert bool(output.token_logprobs.isnan().all()) == bool(logits.log_softmax(-1).isnan().any())


class TestChoice:
    def test_another_device(self) -> None:
        assert "on a CPU, not on meta" in str(CpuNativeSampler.supports(None, SamplerContext(10, torch.device("meta"))))  # type: ignore[arg-type]

    def test_no_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(wanted: str, *, quiet: bool) -> Any:
            raise NativeError("no compiler")

        monkeypatch.setattr(module, "first_that_loads", fails)
        reason = CpuNativeSampler.supports(None, SamplerContext(10, CPU))  # type: ignore[arg-type]
        assert reason is not None
        assert "`python -m pegboard.plugins.cpu_native` says why" in reason
