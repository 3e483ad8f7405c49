"""The conformance suite of Communicator: ranks are threads."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from pegboard.conformance.suite import ContractSuite, capability, lacks
from pegboard.core.interfaces.errors import PegboardError, Unsupported
from pegboard.plugins.parallel.api import Communicator, CommunicatorContext, Rendezvous

R = TypeVar("R")
SECONDS = 20.0
SIZES = (2, 3, 4)
LOCAL = "127.0.0.1"


class CommunicatorContract(ContractSuite):
    """All ranks get what each gave."""

    contract = "communicator"

    def made(self, size: int) -> list[Communicator]:
        """Return as many that have not met."""
        device = torch.device("cpu")
        return [self.build(CommunicatorContext(size, index, device)) for index in range(size)]

    def ranks(self, size: int, does: Callable[[Communicator, int], R]) -> list[R]:
        """Return what each rank returns, all at once. Raises what one of them raises."""
        made = self.made(size)

        def one(index: int) -> R:
            made[index].connect(Path(meeting), SECONDS)
            try:
                return does(made[index], index)
            finally:
                together.wait()
                made[index].close()

        together = threading.Barrier(size, timeout=SECONDS)
        with tempfile.TemporaryDirectory() as meeting, ThreadPoolExecutor(size) as threads:
            return list(threads.map(one, range(size)))

    @pytest.mark.parametrize("size", SIZES)
    def test_all_reduce_sums(self, size: int) -> None:
        shapes = ((), (1,), (7,), (3, 5), (0, 4), (2, 3, 4))

        def sums(comm: Communicator, index: int) -> list[Tensor]:
            return [comm.all_reduce(torch.full(shape, 2.0**index)) for shape in shapes]

        for found in self.ranks(size, sums):
            for shape, total in zip(shapes, found, strict=True):
                assert total.shape == shape
                assert bool((total == 2.0**size - 1).all()), f"{size} ranks gave powers of 2 of shape {shape}"

    @pytest.mark.parametrize("size", SIZES)
    def test_all_ranks_hold_the_same_bits(self, size: int) -> None:
        given = torch.randn(size, 1001, generator=torch.Generator().manual_seed(0)) * 1000
        found = self.ranks(size, lambda comm, index: comm.all_reduce(given[index].clone()))
        assert all(torch.equal(found[0], other) for other in found[1:]), "ranks have rounded differently"
        assert torch.allclose(found[0].double(), given.double().sum(0), atol=1e-2)

    @pytest.mark.parametrize("size", SIZES)
    def test_gather_is_for_rank_0(self, size: int) -> None:
        def gathers(comm: Communicator, index: int) -> Tensor | None:
            return comm.gather(torch.full((2, 3), float(index)))

        first, *others = self.ranks(size, gathers)
        assert first is not None
        assert first.tolist() == [[float(index) for index in range(size) for _ in range(3)]] * 2
        assert others == [None] * (size - 1), "only rank 0 has use for it"

    @pytest.mark.parametrize("size", SIZES)
    def test_broadcast_brings_what_rank_0_has(self, size: int) -> None:
        def tells(comm: Communicator, index: int) -> list[int]:
            found: list[int] = comm.broadcast(torch.tensor([2**40 + 1, index, -1])).tolist()
            return found

        assert self.ranks(size, tells) == [[2**40 + 1, 0, -1]] * size

    @pytest.mark.parametrize("size", SIZES)
    def test_what_is_sent_arrives(self, size: int) -> None:
        """At the rank it is for, whole, with its type, from each of the others."""
        given = (
            torch.tensor(2.5),
            torch.tensor([[2**40 + 1, -3]]),
            torch.ones(0, 4),
            torch.tensor([[0.1], [7]]).bfloat16(),
        )

        def exchanges(comm: Communicator, index: int) -> list[Tensor]:
            found = []
            for source in range(size):
                for to in range(size):
                    for x in given if source != to else ():
                        if index == source:
                            comm.send(x + to, to)
                        elif index == to:
                            found.append(comm.receive(torch.empty_like(x), source))
            return found

        for index, found in enumerate(self.ranks(size, exchanges)):
            expected = [x + index for x in given] * (size - 1)
            assert len(found) == len(expected)
            for x, right in zip(found, expected, strict=True):
                assert x.dtype == right.dtype
                assert torch.equal(x, right), f"rank {index} got {x.tolist()} for {right.tolist()}"

    def test_what_is_sent_keeps_its_order(self) -> None:
        """However many are on their way, in both directions, and whatever happens to them once they are sent."""

        def passes(comm: Communicator, index: int) -> list[float]:
            before, after, said = (index - 1) % 3, (index + 1) % 3, []
            for step in range(40):
                x = torch.full((step % 5 + 1, 3), float(step))
                if index == 0:
                    comm.send(x, after)
                    x.fill_(-1)
                found = comm.receive(torch.empty_like(x), before)
                if index:
                    comm.send(found, after)
                said.append(found.sum().item())
            return said

        expected = [3.0 * step * (step % 5 + 1) for step in range(40)]
        assert self.ranks(3, passes) == [expected] * 3

    def test_receiving_beside_sending(self) -> None:
        """In two threads of each rank: what comes need not wait for what goes."""
        given = torch.randn(2, 2**20, generator=torch.Generator().manual_seed(3))

        def both(comm: Communicator, index: int) -> Tensor:
            with ThreadPoolExecutor(1) as beside:
                coming = beside.submit(comm.receive, torch.zeros_like(given[0]), 1 - index)
                time.sleep(0.01)
                comm.send(given[index], 1 - index)
                return coming.result()

        for index, found in enumerate(self.ranks(2, both)):
            assert torch.equal(found, given[1 - index])

    def test_sending_between_sums(self) -> None:
        """Two of three ranks send each other something between what all of them do, and none is in step."""

        def mixes(comm: Communicator, index: int) -> list[float]:
            said, late = [], torch.Generator().manual_seed(index)
            for step in range(30):
                if float(torch.rand((), generator=late)) < 0.2:
                    time.sleep(0.003)
                source, to = step % 3, (step + 1) % 3
                if index == source:
                    comm.send(torch.full((2,), float(step)), to)
                elif index == to:
                    said.append(float(comm.receive(torch.zeros(2), source)[1]))
                said.append(float(comm.all_reduce(torch.full((3,), float(step + index)))[2]))
            return said

        for index, said in enumerate(self.ranks(3, mixes)):
            expected = []
            for step in range(30):
                expected += [float(step)] * (index == (step + 1) % 3) + [3.0 * step + 3]
            assert said == expected

    def test_tensors_with_gaps_between_their_rows(self) -> None:
        def strided(comm: Communicator, index: int) -> tuple[Tensor, Tensor | None, Tensor]:
            wide = torch.arange(24.0).reshape(4, 6) + 100 * index
            if index:
                comm.send(wide[:, 1:4], 0)
            came = wide if index else comm.receive(torch.zeros(4, 6)[:, ::2], 1)
            return comm.all_reduce(wide[:, ::2]), comm.gather(wide[:, 1:3]), came

        (total, side, came), _ = self.ranks(2, strided)
        assert torch.equal(came, torch.arange(24.0).reshape(4, 6)[:, 1:4] + 100)
        one = torch.arange(24.0).reshape(4, 6)
        assert torch.equal(total, 2 * one[:, ::2] + 100)
        assert side is not None
        assert torch.equal(side, torch.cat([one[:, 1:3], one[:, 1:3] + 100], 1))

    def test_calls_follow_each_other(self) -> None:
        def many(comm: Communicator, index: int) -> list[float]:
            said = []
            for step in range(50):
                ids = comm.broadcast(torch.tensor([step if index == 0 else -1]))
                total = comm.all_reduce(torch.full((2,), float(ids[0])))
                side = comm.gather(total[None, :1] + index)
                said.append(total.sum().item() if side is None else side.sum().item())
            return said

        found = self.ranks(3, many)
        assert found[0] == [9.0 * step + 3 for step in range(50)]
        assert found[1] == found[2] == [6.0 * step for step in range(50)]

    def test_large_tensors(self) -> None:
        """A chunk of a prompt: 512 tokens of a model with 1,000 numbers each, and as many ids."""
        given = torch.randn(2, 512, 1000, generator=torch.Generator().manual_seed(1))
        ids = torch.arange(100_001)

        def all_of_it(comm: Communicator, index: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
            total, side = comm.all_reduce(given[index].clone()), comm.gather(given[index])
            told = comm.broadcast(ids.clone() if index == 0 else torch.zeros_like(ids))
            if index:
                comm.send(given[1], 0)
                return total, side, told, given[1]
            time.sleep(0.02)  # the other one has sent as much as it can
            return total, side, told, comm.receive(torch.zeros_like(given[1]), 1)

        (total, side, told, came), (other, _, heard, _) = self.ranks(2, all_of_it)
        assert torch.equal(came, given[1])
        assert torch.allclose(total, given.sum(0))
        assert torch.equal(total, other)
        assert side is not None
        assert torch.equal(side, torch.cat([given[0], given[1]], 1))
        assert torch.equal(told, ids)
        assert torch.equal(heard, ids)

    def test_ranks_of_different_pace(self) -> None:
        """No rank is overtaken, whichever is late, in any order of calls."""
        kinds = torch.randint(3, (60,), generator=torch.Generator().manual_seed(2)).tolist()

        def unevenly(comm: Communicator, index: int) -> list[float]:
            said, late = [], torch.Generator().manual_seed(index)
            for step, kind in enumerate(kinds):
                if float(torch.rand((), generator=late)) < 0.2:
                    time.sleep(0.003)
                if kind == 0:
                    said.append(float(comm.all_reduce(torch.full((3,), float(step + index)))[2]))
                elif kind == 1:
                    side = comm.gather(torch.full((2, 2), float(step + index)))
                    said.append(-1.0 if side is None else side.sum().item())
                else:
                    said.append(float(comm.broadcast(torch.tensor([step if index == 0 else -1]))[0]))
            return said

        expected = [[3 * step + 3, 12 * step + 12, step][kind] for step, kind in enumerate(kinds)]
        first, *others = self.ranks(3, unevenly)
        assert first == expected
        for other in others:
            assert other == [-1.0 if kind == 1 else value for kind, value in zip(kinds, expected, strict=True)]

    @pytest.mark.parametrize("waits", ["all_reduce", "receive", "send"])
    def test_a_rank_that_leaves_is_noticed(self, waits: str) -> None:
        made, large = self.made(2), torch.ones(2**22)
        calls: dict[str, Callable[[Communicator], object]] = {
            "all_reduce": lambda comm: comm.all_reduce(torch.ones(1)),
            "receive": lambda comm: comm.receive(torch.ones(1), 1),
            "send": lambda comm: comm.send(large, 1),
        }
        left = threading.Event()

        def one(index: int) -> float:
            made[index].connect(Path(meeting), SECONDS)
            if index:
                made[index].all_reduce(torch.ones(1))
                made[index].close()
                left.set()
                return 0.0
            made[index].all_reduce(torch.ones(1))
            assert left.wait(SECONDS)
            started = time.monotonic()
            with pytest.raises(Exception):  # noqa: B017 - of whatever kind
                calls[waits](made[index])
            made[index].close()
            return time.monotonic() - started

        with tempfile.TemporaryDirectory() as meeting, ThreadPoolExecutor(2) as threads:
            waited = max(threads.map(one, range(2)))
        assert waited < SECONDS / 2, "the others waited until their time was over"

    def test_ranks_that_do_not_come(self) -> None:
        alone, _ = self.made(2)
        with tempfile.TemporaryDirectory() as meeting, pytest.raises(PegboardError):
            alone.connect(Path(meeting), 0.3)
        alone.close()

    @capability("machines")
    @pytest.mark.parametrize("size", SIZES)
    def test_ranks_on_several_machines(self, size: int) -> None:
        """They have no directory in common."""
        made, together = self.made(size), threading.Barrier(size, timeout=SECONDS)

        def one(index: int) -> tuple[float, list[int], Tensor | None]:
            meeting = Rendezvous(LOCAL, port, LOCAL, listener if index == 0 else None)
            made[index].connect_machines(meeting, SECONDS)
            try:
                total = made[index].all_reduce(torch.full((3,), 2.0**index))
                ids: list[int] = made[index].broadcast(torch.tensor([7 + index])).tolist()
                return float(total[2]), ids, made[index].gather(torch.full((1, 1), float(index)))
            finally:
                together.wait()
                made[index].close()

        with socket.create_server((LOCAL, 0)) as listener, ThreadPoolExecutor(size) as threads:
            port: int = listener.getsockname()[1]
            found = list(threads.map(one, range(size)))
            assert listener.fileno() >= 0, "it is its caller's"
        assert [total for total, *_ in found] == [2.0**size - 1] * size
        assert [ids for _, ids, _ in found] == [[7]] * size
        side = found[0][2]
        assert side is not None
        assert side.tolist() == [[float(index) for index in range(size)]]

    @capability("machines")
    def test_machines_that_do_not_come(self) -> None:
        first, other = self.made(2)
        with socket.create_server((LOCAL, 0)) as listener, pytest.raises(PegboardError):
            first.connect_machines(Rendezvous(LOCAL, listener.getsockname()[1], LOCAL, listener), 0.3)
        first.close()
        with socket.create_server((LOCAL, 0)) as gone:
            port: int = gone.getsockname()[1]
        with pytest.raises(PegboardError):
            other.connect_machines(Rendezvous(LOCAL, port, LOCAL), 0.3)
        other.close()

    @lacks("machines")
    def test_it_says_that_it_knows_no_other_machines(self) -> None:
        alone, other = self.made(2)
        with pytest.raises(Unsupported):
            alone.connect_machines(Rendezvous(LOCAL, 1, LOCAL), 0.3)
        alone.close()
        other.close()

    @capability("shared_memory")
    @pytest.mark.parametrize("size", SIZES)
    def test_a_region_is_the_memory_of_all_ranks(self, size: int) -> None:
        """What one writes the others read, also once they have closed; at first it is all zeros, as is the next one."""
        whole = torch.arange(1000 * size, dtype=torch.int64).remainder(251).to(torch.uint8).view(size, 1000)

        def writes(comm: Communicator, index: int) -> tuple[list[Tensor], list[Tensor]]:
            assert comm.shares_memory
            regions = [comm.region(1000 * size)]
            fresh = [regions[0].clone()]
            comm.all_reduce(torch.zeros(1))
            regions[0].view(size, 1000)[index] = whole[index]
            comm.all_reduce(torch.zeros(1))
            regions.append(comm.region(7))
            fresh.append(regions[1].clone())
            comm.all_reduce(torch.zeros(1))
            comm.close()
            return regions, fresh

        for (first, second), fresh in self.ranks(size, writes):
            assert first.dtype == torch.uint8
            assert [one.shape for one in (first, second)] == [(1000 * size,), (7,)]
            assert not any(one.any() for one in fresh)
            assert torch.equal(first.view(size, 1000), whole)

    @capability("shared_memory")
    def test_looking_after_the_others(self) -> None:
        """In a thread of native code, which waits by itself."""
        made, left = self.made(2), threading.Event()

        def one(index: int) -> None:
            made[index].connect(Path(meeting), SECONDS)
            made[index].all_reduce(torch.ones(1))
            if index:
                made[index].close()
                left.set()
                return
            assert left.wait(SECONDS)
            with ThreadPoolExecutor(1) as beside, pytest.raises(RuntimeError):
                beside.submit(made[index].check_others, 0.0).result()
            made[index].close()

        def stays(comm: Communicator, index: int) -> None:
            comm.check_others(SECONDS / 2)
            with pytest.raises(TimeoutError):
                comm.check_others(SECONDS + 1)

        self.ranks(3, stays)
        with tempfile.TemporaryDirectory() as meeting, ThreadPoolExecutor(2) as threads:
            list(threads.map(one, range(2)))

    @lacks("shared_memory")
    def test_it_says_that_it_shares_no_memory(self) -> None:
        alone, other = self.made(2)
        assert not alone.shares_memory
        with pytest.raises(Unsupported):
            alone.region(64)
        with pytest.raises(Unsupported):
            alone.check_others(0.0)
        alone.close()
        other.close()

    def test_close_may_be_called_again(self) -> None:
        alone, other = self.made(2)
        alone.close()
        alone.close()
        other.close()
