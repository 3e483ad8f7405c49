"""Threads that leave the cores to others."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from pegboard.toolkit.system.compute import LESS, give_way


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_only_the_thread_that_asks_gives_way() -> None:
    before, found = os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), list[int]()

    def work() -> None:
        give_way()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [min(19, LESS)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
