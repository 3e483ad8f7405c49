"""A trainer's rank 0, in a process of its own, that joins a group as published trainers do, and broadcasts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

GROUP = "weight_update_group"


class Trainer:
    """The process, and what it is told to do."""

    def __init__(self, port: int, size: int = 2) -> None:
        command = [sys.executable, "-m", __name__, str(port), str(size)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, file: Path, names: Sequence[str]) -> None:
        """Have it broadcast tensors of a safetensors file, in this order."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{file} {' '.join(names)}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Have it end once it has sent what it was told to."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def heard(self) -> str:
        """Return what became of that: "sent", or "failed"."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def trainer(port: int) -> Iterator[Trainer]:
    one = Trainer(port)
    with one.process:
        try:
            yield one
        finally:
            one.process.kill()


def main(port: int, size: int) -> None:
    import torch.distributed as dist
    from safetensors.torch import load_file
    from torch.distributed.distributed_c10d import GroupName, PrefixStore, _new_process_group_helper
    from torch.distributed.rendezvous import rendezvous

    patience = timedelta(seconds=60)
    store, rank, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, size, timeout=patience))
    store.set_timeout(patience)
    group, _ = _new_process_group_helper(
        size, rank, [], "gloo", PrefixStore(GROUP, store), group_name=GroupName(GROUP), timeout=patience
    )
    for line in sys.stdin:
        file, *names = line.split()
        tensors = load_file(file)
        try:
            for name in names:
                group.broadcast([tensors[name]], dist.BroadcastOptions()).wait()
            sys.stdout.write("sent\n")
        except RuntimeError:
            sys.stdout.write("failed\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
