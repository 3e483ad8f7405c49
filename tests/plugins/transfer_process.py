"""A source of KV in a process of its own, which tests kill and stop.

python -m tests.plugins.transfer_process nixl '{"ucx": {"TLS": "tcp"}}' 8388608
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pegboard.core.registry.registry import Registry
from pegboard.plugins.kv_handoff.api.transfer import KVTransfer, KVTransferContext, Region
from pegboard.plugins.kv_handoff.suite.rig import LEASE


def build(name: str, options: Mapping[str, object], *memory: np.ndarray) -> KVTransfer:
    """Return an engine of these regions."""
    record = Registry.discover().get("kv_transfer", name)
    assert record is not None
    regions = tuple(Region(one.ctypes.data, one.nbytes, slot_bytes=1, heads=1, buffer=one.data) for one in memory)
    engine: KVTransfer = record.load()(record.options_model()(**options), KVTransferContext(regions))
    return engine


@dataclass
class Process:
    """The source. Its memory holds `value` everywhere."""

    process: subprocess.Popen[str]
    description: bytes
    value: int

    def stop(self) -> None:
        """Stop it, and wait until all of its threads have stopped."""
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def source(name: str, options: Mapping[str, object], nbytes: int, value: int = 7) -> Iterator[Process]:
    """Run a source until the block ends."""
    words = [sys.executable, "-m", "tests.plugins.transfer_process", name, json.dumps(options), str(nbytes), str(value)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            description = ""
            while not description.startswith("described "):  # libraries may write to stdout, too
                description = process.stdout.readline()
                assert description, "the source has ended"
            yield Process(process, bytes.fromhex(description.split()[1]), value)
        finally:
            process.kill()


def main(name: str, options: str, nbytes: str, value: str) -> None:
    memory = np.full(int(nbytes), int(value), np.uint8)
    engine = build(name, json.loads(options), memory)
    engine.allow(LEASE)
    print("described", engine.describe().hex(), flush=True)  # noqa: T201
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
