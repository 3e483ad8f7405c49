"""Calls that come back just when they are given up."""

from __future__ import annotations

import threading
from typing import cast

from pegboard.conformance.admission_gate import ManualClock
from pegboard.plugins.kv_tiers.storage_calls import GRACE_SECONDS, StorageCalls
from pegboard.plugins.kv_tiers.transfer_jobs import TransferJob
from pegboard.plugins.kv_tiers.worker_thread import WorkerThread

PATIENCE = 30.0


def test_a_call_that_is_back_keeps_its_thread() -> None:
    """It comes back between `supervise` finding it late and giving up its thread: that one does the next job."""
    clock, told = ManualClock(), list[tuple[int, str]]()
    asked, goes_on, done = threading.Event(), threading.Event(), threading.Semaphore(0)
    threads = list[int]()

    def ask(deadline: float) -> int:
        asked.set()
        assert goes_on.wait(PATIENCE)
        return 1

    def do(job: TransferJob) -> None:
        threads.append(threading.get_ident())
        if not told:
            told.append(calls.make("fetch", worker, ask, 1, 5.0))
        done.release()

    def opened() -> None:
        goes_on.set()
        assert done.acquire(timeout=PATIENCE)

    calls = StorageCalls("store", clock, lambda: None, opened)
    worker = WorkerThread("worker", do, lambda job, reason: None)
    job = cast("TransferJob", object())
    assert worker.put(job)
    assert asked.wait(PATIENCE)
    clock.now += 5.1 + GRACE_SECONDS
    calls.supervise()
    assert told == [(0, "the storage 'store' overran its deadline of 5 s")]
    assert (calls.abandoned, calls.abandoned_threads, calls.all_back) == (1, 0, True)
    assert worker.put(job)
    assert done.acquire(timeout=PATIENCE)
    assert len(set(threads)) == 1, "another thread took over from one that was at work"
    worker.close()
    assert worker.join(PATIENCE)
