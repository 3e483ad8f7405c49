"""A process that is told to stop does, whatever its loop and its log do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

PATIENCE = 60.0
BEGIN = """
import asyncio, logging, os, signal, sys, time
from pegboard.toolkit.system.logs import configure_logging
from pegboard.toolkit.system.event_loop import loop_factory
from pegboard.toolkit.system.stop_signals import StopSignals

configure_logging("api", "info", "text")
before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
"""
BUSY = """
async def main():
    signals.tell(asyncio.get_running_loop(), lambda: None)
    print("busy", flush=True)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pass

with StopSignals(0.2) as signals, asyncio.Runner(loop_factory=loop_factory()) as runner:
    runner.run(main())
"""
STALLED = """
async def main():
    print("busy", flush=True)
    while True:
        logging.getLogger().warning("x" * 10_000)

with StopSignals(0.2) as signals, asyncio.Runner() as runner:
    runner.run(main())
"""
GOES_ON = """
async def main():
    heard = asyncio.Event()
    signals.tell(asyncio.get_running_loop(), heard.set)
    print("busy", flush=True)
    await heard.wait()

with StopSignals(60.0) as signals:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main())
    # The loop has closed.
    os.kill(os.getpid(), signal.SIGTERM)
assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
# It waits for its end, or for having been called off.
signals._deadline.join(30)
assert not signals._deadline.is_alive()
print("went on")
"""

EARLY = """
with StopSignals(60.0) as signals:
    os.kill(os.getpid(), {number})

    async def main():
        heard = asyncio.Event()
        signals.tell(asyncio.get_running_loop(), heard.set)
        await heard.wait()
        print("busy", flush=True)

    asyncio.run(main())
"""


def started(script: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", BEGIN + script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"busy\n"
    return process


def test_they_are_heard_whatever_the_loop_does() -> None:
    process = started(BUSY)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert b"did not stop" in said


def test_a_log_that_is_not_read_keeps_no_process() -> None:
    """Its loop waits for room in the pipe, with the lock of the log's handler."""
    process = started(STALLED)
    process.send_signal(signal.SIGTERM)
    try:
        assert process.wait(PATIENCE) == 1
    finally:
        process.kill()
        process.communicate()


def test_a_program_goes_on_after_its_server() -> None:
    """Nothing ends it later, and its own handlers are back."""
    process = started(GOES_ON)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, said, errors) == (0, b"went on\n", b"")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_comes_before_the_loop_is_told_too(number: int) -> None:
    process = started(EARLY.format(number=int(number)))
    process.communicate(timeout=PATIENCE)
    assert process.returncode == os.EX_OK
