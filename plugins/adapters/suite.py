"""The conformance suite of AdapterBackend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pegboard.conformance.rig.tape import TapeCapture
from pegboard.conformance.suite import ContractSuite, capability
from pegboard.core.interfaces.forward import FixableAdditions
from pegboard.plugins.adapters.api import COLUMN, AdapterBackend, AdapterContext, AdapterWeights, LowRank
from pegboard.toolkit.model.linear import Part, Site

SLOTS = 3
MAX_RANK = 16
SITES = (
    Site(0, (Part("q", 24), Part("k", 8), Part("v", 8)), 32),
    Site(1, (Part("o", 32),), 24),
    Site(2, (Part("gate", 40), Part("up", 40)), 32),
    Site(3, (Part("down", 32),), 40),
)
_STARTS = {0: (0, 24, 32), 1: (0,), 2: (0, 40), 3: (0,)}

Wanted = Mapping[int, Sequence[int | None]]
"""By site, the rank of each part, None where an adapter has nothing for it."""
EVERYWHERE: Wanted = {0: (4, 4, 4), 1: (4,), 2: (4, 4), 3: (4,)}


def adapter(seed: int, wanted: Wanted = EVERYWHERE, *, scale: float = 0.5) -> AdapterWeights:
    """Return an adapter with normal numbers, to a quarter: bfloat16 has them exactly, also times these scales. Each
    part has a scale of its own.
    """
    draw = torch.Generator().manual_seed(seed)
    sites = {}
    for number, ranks in wanted.items():
        site = SITES[number]
        parts: list[LowRank] = []
        for start, part, rank in zip(_STARTS[number], site.parts, ranks, strict=True):
            if rank is not None:
                a = _quarters(torch.randn(rank, site.cols, generator=draw))
                b = _quarters(torch.randn(part.rows, rank, generator=draw))
                parts.append(LowRank(start, a, b, scale * (1 + len(parts))))
        sites[number] = tuple(parts)
    return AdapterWeights(sites)


def _quarters(numbers: torch.Tensor) -> torch.Tensor:
    return (numbers * 4).round() / 4


def expected(weights: AdapterWeights | None, site: int, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return in float64 what `out` [tokens, rows] becomes with an adapter."""
    found = out.double().clone()
    for part in () if weights is None else weights.sites.get(site, ()):
        added = part.scale * (x.double() @ part.a.double().T @ part.b.double().T)
        found[:, part.start : part.start + len(part.b)] += added
    return found


class AdapterContract(ContractSuite):
    """What is added to each token's product is what its request's adapter says, whatever stands beside it.

    In float32 an element is a sum of at most 40 products, times b, summed over at most 16: it may be off by
    2.5 * 2^-24 * norm(a) * norm(x) * norm(b) twice, which for these numbers is below 1e-4; one scale or one rank
    left out is off by more than 0.1.
    """

    contract = "adapters"

    device = torch.device("cpu")

    dtype: ClassVar[torch.dtype] = torch.float32
    """In which the network computes, and inputs of products are."""

    out_dtype: ClassVar[torch.dtype] = torch.float32
    """Of products. One that is rounded to fewer bits needs a larger tolerance."""

    short_dtype: ClassVar[torch.dtype] = torch.bfloat16
    """Of 16 bits, in which it is tried, too."""

    computed_by: ClassVar[str] = ""
    """The runner for which the backend is, see AdapterContext."""

    @pytest.fixture
    def backend(self) -> AdapterBackend:
        return self.make(self.dtype)

    def make(self, dtype: torch.dtype) -> AdapterBackend:
        ctx = AdapterContext(SITES, dtype, self.device, SLOTS, MAX_RANK, self.computed_by)
        made: AdapterBackend = self.build(ctx)
        return made

    def put(self, array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def check(
        self,
        backend: AdapterBackend,
        adapters: Mapping[int, AdapterWeights],
        slots: Sequence[int],
        lens: Sequence[int],
        tolerance: float = 1e-4,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        """Compare a batch's products at all sites with what the adapters in these slots make of them."""
        additions = backend.begin(np.array(slots, np.int64), np.array(lens, np.int64), self.put)
        assert additions is not None
        draw = torch.Generator().manual_seed(99)
        dtype, out_dtype = backend.ctx.dtype, out_dtype or self.out_dtype
        for site in SITES:
            x = torch.randn(sum(lens), site.cols, generator=draw).to(dtype).to(self.device)
            out = torch.randn(sum(lens), site.rows, generator=draw).to(out_dtype).to(self.device)
            before, kept = out.clone(), x.clone()
            additions.add(site.number, x, out)
            assert torch.equal(x, kept), "it has changed its input"
            start = 0
            for slot, count in zip(slots, lens, strict=True):
                rows = slice(start, start + count)
                start += count
                if not slot:
                    assert torch.equal(out[rows], before[rows]), "a request without an adapter gets something"
                    continue
                wanted = expected(adapters[slot], site.number, x[rows].cpu(), before[rows].cpu())
                torch.testing.assert_close(out[rows].cpu().double(), wanted, rtol=tolerance, atol=tolerance)

    def put_in(self, backend: AdapterBackend, adapters: Mapping[int, AdapterWeights]) -> None:
        for slot, weights in adapters.items():
            backend.activate(slot, backend.prepare(weights))

    @pytest.mark.parametrize("lens", [[5], [1], [1, 1, 1], [3, 1, 4], [9, 1, 9]])
    def test_one_adapter(self, backend: AdapterBackend, lens: list[int]) -> None:
        adapters = {1: adapter(1)}
        self.put_in(backend, adapters)
        self.check(backend, adapters, [1] * len(lens), lens)

    @pytest.mark.parametrize("slots", [[1, 2, 3], [3, 1, 3, 2, 1], [2, 2, 3], [1, 0, 2, 0, 1], [0, 0, 3], [2, 0, 0]])
    @pytest.mark.parametrize("most", [1, 5])
    def test_any_mix(self, backend: AdapterBackend, slots: list[int], most: int) -> None:
        """Requests of one adapter need not stand together, and base requests stand between them."""
        adapters = {slot: adapter(slot) for slot in (1, 2, 3)}
        self.put_in(backend, adapters)
        self.check(backend, adapters, slots, [1 + 2 * place % most for place in range(len(slots))])

    def test_without_adapters_there_is_nothing_to_do(self, backend: AdapterBackend) -> None:
        self.put_in(backend, {1: adapter(1)})
        assert backend.begin(np.zeros(3, np.int64), np.array([1, 4, 1]), self.put) is None

    @pytest.mark.parametrize(
        "wanted",
        [
            {0: (4, None, None)},
            {0: (None, 4, None)},
            {0: (None, None, 4), 2: (None, 4)},
            {0: (1, 16, 7), 2: (16, 2)},
            {3: (16,)},
            {1: (1,)},
        ],
    )
    def test_some_parts_with_ranks_of_their_own(self, backend: AdapterBackend, wanted: Wanted) -> None:
        adapters = {1: adapter(1, wanted), 2: adapter(2)}
        self.put_in(backend, adapters)
        self.check(backend, adapters, [2, 1, 2, 1], [2, 3, 1, 1])

    def test_a_slot_gets_another_adapter(self, backend: AdapterBackend) -> None:
        """Nothing of the first one is left, where the second has fewer parts and smaller ranks."""
        self.put_in(backend, {1: adapter(1, {0: (16, 16, 16), 1: (16,)}), 2: adapter(2)})
        self.check(backend, {1: adapter(1, {0: (16, 16, 16), 1: (16,)})}, [1], [3])
        second = {1: adapter(7, {0: (None, 2, None), 3: (3,)}), 2: adapter(2)}
        self.put_in(backend, {1: second[1]})
        self.check(backend, second, [1, 2, 1], [2, 2, 1])
        backend.clear(1)
        self.check(backend, second, [2, 0], [2, 2])
        self.put_in(backend, {1: adapter(8)})
        self.check(backend, {1: adapter(8), 2: second[2]}, [1, 2], [2, 2])

    def test_one_adapter_in_two_slots(self, backend: AdapterBackend) -> None:
        prepared, weights = backend.prepare(adapter(1)), adapter(1)
        backend.activate(1, prepared)
        backend.activate(3, prepared)
        backend.clear(1)
        self.check(backend, {3: weights}, [3, 0], [2, 1])

    def test_a_batch_under_way_keeps_what_it_began_with(self, backend: AdapterBackend) -> None:
        """A prefill in parts goes on after another batch, for which a free slot has got another adapter."""
        first = {1: adapter(1), 2: adapter(2)}
        self.put_in(backend, first)
        slots, lens = np.array([1, 0], np.int64), np.array([2, 1], np.int64)
        additions = backend.begin(slots, lens, self.put)
        assert additions is not None
        self.put_in(backend, {2: adapter(5)})
        self.check(backend, {2: adapter(5)}, [2], [4])
        x = torch.ones(3, SITES[1].cols, dtype=self.dtype, device=self.device)
        out = torch.zeros(3, SITES[1].rows, dtype=self.out_dtype, device=self.device)
        additions.add(1, x, out)
        wanted = expected(first[1], 1, x[:2].cpu(), torch.zeros(2, SITES[1].rows))
        torch.testing.assert_close(out[:2].cpu().double(), wanted, rtol=1e-4, atol=1e-4)
        assert not out[2].any()

    def test_rows_with_gaps(self, backend: AdapterBackend) -> None:
        """Rows of `x` may have gaps between them, and `out` may be a part of something wider."""
        weights = adapter(1)
        self.put_in(backend, {1: weights})
        additions = backend.begin(np.array([1, 0, 1]), np.array([2, 1, 1]), self.put)
        assert additions is not None
        draw = torch.Generator().manual_seed(5)
        wide = torch.randn(4, 2 * SITES[1].cols, generator=draw).to(self.dtype).to(self.device)
        outs = torch.zeros(4, SITES[1].rows + 8, dtype=self.out_dtype, device=self.device)
        x, out = wide[:, ::2], outs[:, 4:-4]
        additions.add(1, x, out)
        wanted = expected(weights, 1, x.cpu(), torch.zeros(4, SITES[1].rows))
        wanted[2] = 0
        torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-4, atol=1e-4)
        assert not outs[:, :4].any()
        assert not outs[:, -4:].any()

    def test_in_16_bits(self) -> None:
        """Factors and small products are rounded, each off by 2^-8 relative at most; sums of 40 and of 4 such."""
        backend, adapters = self.make(self.short_dtype), {1: adapter(1, scale=0.1), 2: adapter(2, scale=0.1)}
        self.put_in(backend, adapters)
        self.check(backend, adapters, [1, 2, 0, 1], [2, 1, 1, 1], tolerance=0.15, out_dtype=self.short_dtype)

    @capability("graph")
    @pytest.mark.parametrize("most", [1, 3])
    def test_a_graph_follows_the_column(self, backend: AdapterBackend, most: int) -> None:
        """What was recorded with some slots adds, when it is replayed, what others say; and nothing to padding."""
        adapters = {slot: adapter(slot) for slot in (1, 2, 3)}
        self.put_in(backend, adapters)
        additions = backend.begin(np.arange(1, most + 1), np.ones(most, np.int64), self.put)
        assert isinstance(additions, FixableAdditions)
        column = torch.zeros(6, dtype=torch.int64, device=self.device)
        fixed = additions.fixed(6, {COLUMN: column})
        for site in SITES:
            x = torch.zeros(6, site.cols, dtype=self.dtype, device=self.device)
            before = torch.zeros(6, site.rows, dtype=self.out_dtype, device=self.device)

            def run(number: int = site.number, x: torch.Tensor = x, before: torch.Tensor = before) -> torch.Tensor:
                out = before + 0
                fixed.add(number, x, out)
                return out

            replay, out = TapeCapture().capture(run)
            for slots in ([1, 0, 3, 2, 1, 0], [0, 0, 0, 0, 0, 2]):
                draw = torch.Generator().manual_seed(sum(slots))
                column.copy_(torch.tensor(slots))
                x.copy_(torch.randn(x.shape, generator=draw))
                before.copy_(torch.randn(before.shape, generator=draw))
                replay()
                for row, slot in enumerate(slots):
                    rows = x[row : row + 1].cpu(), before[row : row + 1].cpu()
                    wanted = expected(adapters.get(slot), site.number, *rows)
                    torch.testing.assert_close(out[row : row + 1].cpu().double(), wanted, rtol=1e-4, atol=1e-4)

    def test_the_weights_stay_as_they_are(self, backend: AdapterBackend) -> None:
        weights, same = adapter(1), adapter(1)
        self.put_in(backend, {1: weights})
        self.check(backend, {1: same}, [1], [2])
        for number, parts in weights.sites.items():
            for part, kept in zip(parts, same.sites[number], strict=True):
                assert torch.equal(part.a, kept.a)
                assert torch.equal(part.b, kept.b)

    def test_it_says_what_an_adapter_takes(self, backend: AdapterBackend) -> None:
        assert backend.host_bytes(backend.prepare(adapter(1)), 1000) > 0

    def test_it_says_what_slots_take(self, backend: AdapterBackend) -> None:
        assert backend.device_bytes >= 0
