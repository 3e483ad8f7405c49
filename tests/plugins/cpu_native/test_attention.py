"""Attention alone: against float64 over the same keys and values, whatever is shared, cut, windowed and mixed.

Slots that nobody has written hold NaN: none of it may get anywhere.
"""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.plugins.cpu_native.library import load
from pegboard.plugins.cpu_native.model import NativeModel
from pegboard.toolkit.model.decoder_spec import DecoderSpec
from tests.plugins.cpu_native.instruction_sets import EACH, SETS

SLOTS = 9000
HEADS = {"3x64": (3, 3, 64), "1x64": (2, 1, 64), "2x128": (2, 2, 128), "4x16": (2, 4, 16), "8x80": (1, 8, 80)}
"""KV heads, query heads of each, and their size."""


class Case:
    """Requests over one pool: what they share, how long they are, and how many of their tokens are new."""

    def __init__(self, kv_heads: int, dim: int, seed: int = 0) -> None:
        self.draw = np.random.default_rng(seed)
        self.kv_heads, self.dim = kv_heads, dim
        # A first half that is handed out in a row, and a second one in any order.
        self.row, self.free = 0, (SLOTS // 2 + self.draw.permutation(SLOTS // 2)).tolist()
        self.keys = torch.full((SLOTS, kv_heads, dim), float("nan"), dtype=torch.bfloat16)
        self.values = self.keys.clone()
        self.requests: list[tuple[list[int], int]] = []

    def slots(self, count: int, *, together: bool = False) -> list[int]:
        """Fresh ones, with keys and values in them."""
        if together:  # as a prompt gets them
            taken = list(range(self.row, self.row + count))
            self.row += count
        else:
            taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count
        assert self.row <= SLOTS // 2
        for buffer, size in ((self.keys, 2.0), (self.values, 1.0)):
            numbers = size * self.draw.standard_normal((count, self.kv_heads, self.dim))
            buffer[taken] = torch.from_numpy(numbers).bfloat16()
        return taken

    def request(self, *slots: list[int], new: int = 1) -> None:
        """One whose `new` last positions are computed in this step."""
        self.requests.append((list(itertools.chain(*slots)), new))

    def batch(self, only: int | None = None) -> Any:
        requests = self.requests if only is None else [self.requests[only]]
        # Rows of requests are anywhere in the table, and behind a request's slots there are those of older ones.
        rows = np.random.default_rng(5).permutation(len(requests) + 3)[: len(requests)]
        table = torch.randint(0, SLOTS, (len(requests) + 3, max(len(slots) for slots, _ in requests) + 5)).int()
        for row, (slots, _) in zip(rows, requests, strict=True):
            table[row, : len(slots)] = torch.tensor(slots)
        lengths = torch.tensor([len(slots) for slots, _ in requests])
        new = torch.tensor([new for _, new in requests])
        pool = SimpleNamespace(keys=lambda layer: self.keys, values=lambda layer: self.values)
        positions = torch.cat([torch.arange(n - k, n) for n, k in zip(lengths.tolist(), new.tolist(), strict=True)])
        return SimpleNamespace(
            num_tokens=int(new.sum()),
            batch_size=len(requests),
            input_ids=torch.zeros(int(new.sum()), dtype=torch.int64),
            overlay=None,
            tail_lens=None,
            tail_bits=None,
            positions=positions,
            req_pool_indices=torch.from_numpy(rows.astype(np.int64)),
            seq_lens=lengths,
            extend_start_loc=None if int(new.max()) == 1 else new.cumsum(0) - new,
            kv_groups=[SimpleNamespace(out_cache_loc=torch.zeros(int(new.sum()), dtype=torch.int64), row_table=table)],
            kv_pool=pool,
            logits_indices=None,
        )

    def exact(self, queries: torch.Tensor, window: int) -> torch.Tensor:
        """In float64, float [tokens, heads, dim]."""
        found, at = [], 0
        group = queries.shape[1] // self.kv_heads
        for slots, new in self.requests:
            keys, values = (one[slots].double().repeat_interleave(group, 1) for one in (self.keys, self.values))
            scores = torch.einsum("qhd,khd->hqk", queries[at : at + new].double(), keys) * self.dim**-0.5
            behind = torch.arange(len(slots) - new, len(slots))[:, None] - torch.arange(len(slots))
            scores[:, (behind < 0) | (behind >= (window or len(slots)))] = -torch.inf
            found.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
            at += new
        return torch.cat(found)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@cache
def model(directory: Path, instructions: str, heads: str, window: int, threads: int) -> NativeModel:
    kv_heads, group, dim = HEADS[heads]
    settings: dict[str, Any] = {"hidden_size": 16 * kv_heads * group, "head_dim": dim}
    settings |= {"num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads}
    if window:
        settings["sliding_window"] = window
    checkpoint = tiny_checkpoint(directory, "mistral" if window else "llama", **settings)
    spec = DecoderSpec.from_config(json.loads((checkpoint / "config.json").read_text()))
    assert (spec.num_kv_heads, spec.head_dim, spec.windows[0] or 0) == (kv_heads, dim, window)
    return NativeModel(load(instructions), spec, checkpoint, threads, "bf16")


def check(case: Case, native: NativeModel, window: int = 0) -> torch.Tensor:
    queries = torch.randn(case.batch().num_tokens, native.spec.num_heads, case.dim, generator=torch.manual_seed(3))
    found = native.attend(case.batch(), 0, queries).double()
    exact = case.exact(queries, window)
    # A rounded query moves a score of about 2 by 2^-9 of its terms; a rounded weight and answer are off by 2^-9 each.
    error = (found - exact).abs()
    assert bool(error.isfinite().all()), "NaN of slots that are not theirs"
    assert float(error.max()) < 0.03 * float(exact.abs().max())
    assert float(error.square().mean().sqrt()) < 0.004 * float(exact.square().mean().sqrt())
    return found


def singles(case: Case) -> None:
    """Requests that decode, of many lengths, alone with their slots."""
    for n in (1, 2, 15, 16, 17, 31, 33, 127, 128, 129, 200, 300):
        case.request(case.slots(n, together=n % 2 == 0))
    case.request(case.slots(12, together=True), case.slots(20))  # in a row, and then not


def groups(case: Case) -> None:
    """Two groups with prefixes of their own, one of them with a longer one within; somebody alone; some who have but a
    part of a prefix, or only it and their newest token.
    """
    one, inner, two = case.slots(300, together=True), case.slots(257), case.slots(250)
    for n in (1, 40, 3):
        case.request(one, case.slots(n))
    for n in (9, 1, 60, 130):
        case.request(one, inner, case.slots(n))
    for n in (5, 64):
        case.request(two, case.slots(n))
    case.request(case.slots(90))
    case.request(one[:210], case.slots(20))
    case.request(two[:249], case.slots(1))


def mixed(case: Case) -> None:
    """Prompts, chunks with a cached beginning, and requests that decode, with prefixes in common."""
    prefix = case.slots(260)
    case.request(case.slots(150), new=150)
    case.request(prefix, case.slots(4), new=4)
    case.request(prefix, case.slots(30))
    case.request(prefix, case.slots(140), new=133)
    case.request(prefix, case.slots(21), new=16)
    case.request(case.slots(70), new=20)
    case.request(prefix[:90], case.slots(3), new=2)
    case.request(prefix, case.slots(1))


def long(case: Case) -> None:
    """Few requests for many threads: their keys are cut."""
    case.request(case.slots(3000))
    case.request(case.slots(1000), new=5)


def sixteen(case: Case) -> None:
    """More queries together than one task takes."""
    prefix = case.slots(130)
    for n in range(1, 17):
        case.request(prefix, case.slots(12 + n), new=12)


CASES = {one.__name__: one for one in (singles, groups, mixed, long, sixteen)}


@pytest.mark.parametrize("arrangement", CASES)
@pytest.mark.parametrize("window", [0, 40, 250])
@pytest.mark.parametrize("instructions", EACH)
def test_it_is_attention(directory: Path, instructions: str, window: int, arrangement: str) -> None:
    case = Case(3, 64)
    CASES[arrangement](case)
    check(case, model(directory, instructions, "3x64", window, 3), window)


@pytest.mark.parametrize("arrangement", ["groups", "mixed"])
@pytest.mark.parametrize("heads", [name for name in HEADS if name != "3x64"])
@pytest.mark.parametrize("instructions", EACH)
def test_heads_of_other_sizes(directory: Path, instructions: str, heads: str, arrangement: str) -> None:
    case = Case(HEADS[heads][0], HEADS[heads][2])
    CASES[arrangement](case)
    check(case, model(directory, instructions, heads, 0, 2))


@pytest.mark.parametrize("arrangement", CASES)
@pytest.mark.parametrize("window", [0, 40])
def test_nobody_depends_on_who_else_is_there(directory: Path, window: int, arrangement: str) -> None:
    """A request gets the same alone, where nothing is shared, in any number of threads, but for rounding."""
    case = Case(3, 64)
    CASES[arrangement](case)
    together = check(case, model(directory, SETS[0], "3x64", window, 1), window)
    queries = torch.randn(together.shape, generator=torch.manual_seed(3))
    at = 0
    for i, (_, new) in enumerate(case.requests):
        alone = model(directory, SETS[0], "3x64", window, 4).attend(case.batch(only=i), 0, queries[at : at + new])
        error = (alone.double() - together[at : at + new]).abs()
        assert float(error.max()) < 0.02 * float(together.abs().max()), i
        at += new


def test_large_scores(directory: Path) -> None:
    """One key that outweighs all others by far: in the prefix, in what is a request's own, at its end."""
    for at, window in ((5, 0), (150, 0), (259, 40)):
        case = Case(3, 64)
        prefix = case.slots(200)
        for _ in range(6):
            case.request(prefix, case.slots(60))
        for slots, _ in case.requests:
            case.keys[slots[at]] = 500.0
        queries = torch.rand(6, 9, 64, generator=torch.manual_seed(1)) + 1
        found = model(directory, SETS[0], "3x64", window, 2).attend(case.batch(), 0, queries).double()
        exact = case.exact(queries, window)
        assert bool(found.isfinite().all())
        assert float((found - exact).abs().max()) < 0.01 * float(exact.abs().max())
