"""What a mover moves, in which order, and what becomes of jobs that are stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pegboard.plugins.kv_tiers.mover import LocalMover
from pegboard.toolkit.system.compute import compute_alone
from tests.plugins.kv_tiers.tier_rig import BLOCK_PAGES, Rig, blocks, names, until

Make = Callable[..., Rig]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[Rig] = []

    def make(stores: int = 1, **more: Any) -> Rig:
        made.append(Rig(monkeypatch, stores, **more))
        return made[-1]

    yield make
    for rig in made:
        rig.host.gate.set()
        rig.close()


@pytest.mark.parametrize("views", [False, True])
def test_what_is_saved_and_stored_comes_back(make: Make, views: bool) -> None:
    rig = make(views=views)
    device, host = np.arange(20, 34), np.arange(101, 115)
    assert rig.ended(rig.mover.save(device, host)) == (14, "")
    assert rig.host.saves == [3, 3, 3, 3, 2]
    expected = rig.host.pages[host].copy()
    rows = [buffer.view(-1, 8)[torch.from_numpy(device)] for buffer in (rig.pool.keys(0), rig.pool.values(0))]
    assert (expected == torch.cat(rows, dim=1).numpy().view(np.uint8)).all()

    scattered = np.array([1, 2, 9, 8, 3, 4, 20, 5, 12, 13, 30, 31, 7, 6]).reshape(7, BLOCK_PAGES)
    assert rig.ended(rig.mover.store(0, names(7), host.reshape(7, BLOCK_PAGES))) == (7, "")
    assert set(rig.storages[0].place.blocks) == set(names(7))
    assert rig.ended(rig.mover.find(names(9))) == (7, "")
    assert rig.ended(rig.mover.fetch(names(9), np.concatenate((scattered, blocks(2, 50))))) == (7, "")
    assert (rig.host.pages[scattered.reshape(-1)] == expected).all()
    stats = rig.mover.stats()
    assert stats["saved_bytes_total"] == expected.nbytes
    assert stats["store0_read_bytes_total"] == stats["store0_written_bytes_total"] == expected.nbytes
    until(lambda: rig.mover.stats().get("store0_blocks") == 7)  # the storage's own word
    assert stats["store0_failures_total"] == 0


def test_what_a_storage_has_is_not_written_again(make: Make) -> None:
    rig = make()
    rig.fill(names(5))
    rig.storages[0].faults.calls.clear()
    assert rig.ended(rig.mover.store(0, names(5), blocks(5))) == (5, "")
    assert "set" not in rig.storages[0].faults.calls
    assert rig.ended(rig.mover.store(0, names(6), blocks(6))) == (6, "")
    assert rig.storages[0].faults.calls["set"] == 1


def test_the_nearest_storage_is_asked_first_and_the_next_for_the_rest(make: Make) -> None:
    rig = make(2)
    rig.fill(names(7), store=1)
    rig.fill(names(3), store=0)
    expected = rig.fill(names(7), store=1)
    rig.storages[0].place.lose(names(1, first=5))
    for storage in rig.storages:
        storage.faults.calls.clear()
    assert rig.ended(rig.mover.find(names(9))) == (7, "")
    assert rig.ended(rig.mover.fetch(names(9), blocks(9))) == (7, "")
    assert (rig.block(blocks(7))[3:] == expected[3:]).all()
    first, second = (storage.faults.calls for storage in rig.storages)
    assert first == {"exists": 1, "get": 2}  # 2 and 2 of them, and no more behind a miss
    assert second == {"exists": 1, "get": 3}  # 2, 2 and the next 2, from the fourth on


def test_jobs_of_a_kind_end_in_their_order(make: Make) -> None:
    groups: list[list[Any]] = []
    seen: list[bool] = []

    def look() -> None:
        while not (seen and all(job.done for group in groups for job in group)):
            # The later ones are looked at first: what has ended meanwhile does no harm.
            done = [[job.done for job in reversed(group)] for group in groups]
            seen.append(done == [sorted(flags) for flags in done])

    rig = make()
    rig.host.gate.clear()
    faults = rig.storages[0].faults
    faults.hang()
    mover, pages = rig.mover, np.arange(1, 5)
    groups.append([mover.save(pages, pages) for _ in range(4)])
    groups.append([mover.store(0, names(3, 3 * number), blocks(3)) for number in range(4)])
    groups.append([mover.find(names(1)), mover.fetch(names(1), blocks(1, 20)), mover.find(names(1))])
    until(lambda: faults.hanging == 2)
    jobs = [job for group in groups for job in group]
    watcher = threading.Thread(target=look)
    watcher.start()
    assert not rig.mover.wait(jobs, 0.05)
    rig.host.gate.set()
    faults.release()
    assert rig.mover.wait(jobs, 10)
    watcher.join()
    assert all(seen)
    assert rig.host.saves == [3, 1] * 4
    assert list(rig.storages[0].place.blocks) == names(12)


def test_a_job_that_waits_is_stopped_at_once_and_one_under_way_between_pieces(make: Make) -> None:
    rig = make()
    rig.fill(names(8))
    faults = rig.storages[0].faults
    faults.hang()
    first, second = rig.mover.fetch(names(8), blocks(8)), rig.mover.fetch(names(8), blocks(8, 30))
    rig.host.gate.clear()
    saves = [rig.mover.save(np.arange(1, 9), np.arange(1, 9)) for _ in range(2)]
    until(lambda: faults.hanging == 1 and rig.host.saves)
    for job in (second, saves[1]):
        rig.mover.cancel(job)
        assert (job.done, job.result, job.error) == (True, 0, "")
    for job in (first, saves[0]):
        rig.mover.cancel(job)
        assert not job.done  # its pages are being written to
    faults.release()
    rig.host.gate.set()
    assert rig.ended(first) == (2, "")
    assert rig.ended(saves[0]) == (3, "")
    rig.mover.cancel(first)
    assert rig.ended(rig.mover.fetch(names(8), blocks(8))) == (8, "")
    assert rig.host.saves == [3]


def test_a_job_between_two_storages_is_stopped_at_once(make: Make) -> None:
    rig = make(2)
    rig.fill(names(1))
    rig.storages[1].faults.hang()
    hanging = rig.mover.find(names(2))
    waiting = rig.mover.fetch(names(2), blocks(2))
    until(lambda: rig.storages[1].faults.hanging == 1 and rig.storages[0].faults.calls["get"] == 1)
    until(lambda: waiting.store == 1)
    rig.mover.cancel(waiting)
    assert waiting.done
    assert (waiting.result, waiting.error) == (1, "")
    rig.storages[1].faults.release()
    assert rig.ended(hanging) == (1, "")


def test_what_the_host_pool_does_wrong_ends_the_job(make: Make) -> None:
    rig = make()
    rig.fill(names(2))
    rig.host.error = OSError("no such memory")
    for job in (rig.mover.save(np.arange(1, 3), np.arange(1, 3)), rig.mover.fetch(names(2), blocks(2))):
        assert rig.ended(job) == (0, "OSError: no such memory")
    assert rig.ended(rig.mover.store(0, names(3), blocks(3))) == (2, "OSError: no such memory")
    rig.host.error = None
    stats = rig.mover.stats()
    assert (stats["save_failures_total"], stats["store0_failures_total"]) == (1, 0)
    assert rig.ended(rig.mover.fetch(names(2), blocks(2))) == (2, "")


def test_the_copy_thread_is_started_again(make: Make) -> None:
    rig = make()
    rig.host.error = SystemExit("gone")
    result, error = rig.ended(rig.mover.save(np.arange(1, 3), np.arange(1, 3)))
    assert result == 0
    assert "SystemExit" in error
    rig.host.error = None
    assert rig.ended(rig.mover.save(np.arange(1, 3), np.arange(1, 3))) == (2, "")
    assert rig.mover.stats()["save_restarts_total"] == 1


def test_a_mover_without_tiers_ends_all_jobs_at_once(make: Make) -> None:
    pool = make().pool
    mover = LocalMover(pool, None)
    assert (mover.host_pages, mover.block_pages, mover.stores) == (0, 1, ())
    save, find, fetch = (
        mover.save(np.arange(1, 2), np.arange(1, 2)),
        mover.find(names(1)),
        mover.fetch(names(1), np.ones((1, 1), np.int64)),
    )
    assert save.done
    assert save.error
    assert (find.done, find.result, find.error) == (True, 0, "")
    assert fetch.done
    assert fetch.error
    assert mover.close() == ()


def test_what_cannot_be_meant_is_refused(make: Make) -> None:
    rig = make()
    with pytest.raises(ValueError, match="2 device pages"):
        rig.mover.save(np.arange(2), np.arange(3))
    with pytest.raises(ValueError, match="3 keys need host pages"):
        rig.mover.fetch(names(3), blocks(2))
    with pytest.raises(IndexError, match="none of index 1"):
        rig.mover.store(1, names(1), blocks(1))
    with pytest.raises(ValueError, match="need a host pool"):
        LocalMover(rig.pool, None, [("one", rig.storages[0])])


def test_a_thread_that_computes_alone_leaves_the_others_their_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    found: list[int] = []

    def alone() -> None:
        compute_alone()
        threading.Thread(target=lambda: found.append(torch.get_num_threads())).run()
        torch.ones(100_000).sin()  # which would take the number that holds for new threads
        found.append(torch.get_num_threads())

    for work in (alone, lambda: found.append(torch.get_num_threads())):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [1, 1, 2]
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
