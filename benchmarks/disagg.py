"""What KV costs to move between servers: engines of the contract `kv_transfer`, over loopback.

    python -m benchmarks.disagg                 # 47 MB as 60 buffers of 2,048 tokens, medians of 15
    python -m benchmarks.disagg --quick         # to see that it works; figures mean little
    python -m benchmarks.disagg --engines tcp nixl mooncake     # in .transfer, of `make transfer-packages`
    python -m benchmarks.disagg --engines nixl/direct nixl      # without staging, and with it

A source lives in a process of its own, as in another server. Each row reads the same bytes, out of pages of so many
tokens that are spread over its pool, into pages that are spread over the reader's; a page of 16 tokens is a piece of
6,144 B in each buffer. The rows `heads` read half of the heads of twice as many tokens, in pages of 16: a piece of
192 B for each token in each buffer, into a pool that has these heads alone, as between other tensor-parallel sizes.

The plain socket sends as many bytes from one buffer into another one, by sendall and recv_into, from another quarter of
it each time, since an engine's memory is not in the processor's caches either. All rows take turns, and ratios are
medians over turns: above 1 an engine is faster than the plain socket. Beside `nixl` NIXL alone reads pages of the same
size, as one transfer: `raw` rows, with the engine's ratio to them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.disagg_nixl import RawNixl
from pegboard.core.registry.registry import Registry
from pegboard.plugins.kv_handoff.api.transfer import KVTransfer, KVTransferContext, Ranges, Region, TransferState
from pegboard.tools.bench.report import machine

REGIONS = 60
"""K and V of the demo model's 30 layers."""
SLOT = 384
"""Bytes of a token in each: 3 heads of 64, in bf16."""
TIMES = 4
"""Slots of a pool over those that are read."""
LEASE = 1
PAGES = (1, 16, 64)
HEADS = "heads"
DIRECT = "/direct"
"""Behind an engine's name: without staging, so piece by piece."""
RAW = "nixl raw "
TIMEOUT = 60.0


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens whose KV is read")
    parser.add_argument("--engines", nargs="+", default=["tcp"], help="providers of kv_transfer")
    parser.add_argument("--quick", action="store_true", help="few and short runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    args = parser.parse_args(words)
    if args.quick:
        args.runs, args.tokens = 2, 256
    return args


def pool(tokens: int) -> tuple[list[np.ndarray], tuple[Region, ...]]:
    """Return the memory of a pool, all of it written to, and its regions."""
    buffers = [np.full(TIMES * tokens * SLOT, number, np.uint8) for number in range(REGIONS)]
    return buffers, tuple(Region(one.ctypes.data, one.nbytes, SLOT, heads=3, buffer=one.data) for one in buffers)


def build(engine: str, regions: tuple[Region, ...]) -> KVTransfer:
    """Return an engine of this name. Raises SystemExit where it does not work here."""
    name = engine.removesuffix(DIRECT)
    record = Registry.discover().get("kv_transfer", name)
    if record is None:
        raise SystemExit(f"--engines: there is no kv_transfer {name!r}")
    options = record.options_model()(**({"staging": 0} if engine.endswith(DIRECT) else {}))
    cls, ctx = record.load(), KVTransferContext(regions)
    if objection := cls.supports(options, ctx):
        raise SystemExit(f"--engines: {engine} {objection}")
    made: KVTransfer = cls(options, ctx)
    return made


def pieces(tokens: int, page: int, seed: int) -> Ranges:
    """Return pages of this size that have so many tokens together, anywhere in a pool, region after region."""
    count = tokens // page
    pages = np.random.default_rng(seed).permutation(TIMES * count)[:count]
    offsets = np.tile(pages.astype(np.int64) * page * SLOT, REGIONS)
    regions = np.repeat(np.arange(REGIONS, dtype=np.int32), count)
    return Ranges(regions, offsets, np.full(len(offsets), page * SLOT, np.int64))


def heads(tokens: int, seed: int, slot: int) -> Ranges:
    """Return half of the heads of twice as many tokens, in pages of 16, out of slots of so many bytes: whole ones, or
    those of a pool that has these heads alone.
    """
    page, half = 16, SLOT // 2
    count = 2 * tokens // page
    pages = np.random.default_rng(seed).permutation(TIMES * tokens // page)[:count].astype(np.int64)
    slots = (pages[:, None] * page + np.arange(page)).ravel()
    regions = np.repeat(np.arange(REGIONS, dtype=np.int32), 2 * tokens)
    return Ranges(regions, np.tile(slots * slot, REGIONS), np.full(len(regions), half, np.int64))


def reads(tokens: int, run: int) -> dict[str, tuple[Ranges, Ranges]]:
    """Return source and target of each row's read."""
    found = {str(page): (pieces(tokens, page, 2 * run), pieces(tokens, page, 2 * run + 1)) for page in PAGES}
    return found | {HEADS: (heads(tokens, 2 * run, SLOT), heads(tokens, 2 * run + 1, SLOT // 2))}


def serve(pipe: Connection, engines: Sequence[str], tokens: int) -> None:
    """Be the source, until the reader has had enough."""
    _, regions = pool(tokens)
    made = {name: build(name, regions) for name in engines}
    for one in made.values():
        one.allow(LEASE)
    raw = RawNixl(regions) if has_nixl(engines) else None
    nbytes = tokens * SLOT * REGIONS
    data = np.ones((TIMES, nbytes), np.uint8)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(({name: one.describe() for name, one in made.items()}, raw and raw.place, listener.getsockname()[1]))
        connection, _ = listener.accept()
        with connection:
            while quarter := connection.recv(1):
                connection.sendall(data[quarter[0]].data)
    for one in made.values():
        one.close()


def has_nixl(engines: Sequence[str]) -> bool:
    return any(one.removesuffix(DIRECT) == "nixl" for one in engines)


class Plain:
    """The plain socket."""

    def __init__(self, port: int, nbytes: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._data = np.zeros((TIMES, nbytes), np.uint8)

    def run(self, number: int) -> float:
        """Seconds that all bytes take."""
        view, start = memoryview(self._data[number % TIMES].data), time.perf_counter()
        self._socket.sendall(bytes([number % TIMES]))
        while view:
            view = view[self._socket.recv_into(view) :]
        return time.perf_counter() - start

    def close(self) -> None:
        self._socket.close()


def read(engine: KVTransfer, source: Ranges, target: Ranges) -> float:
    """Seconds that a read takes, from the call to the poll that tells its end."""
    start = time.perf_counter()
    handle = engine.read("source", LEASE, source, target)
    while time.perf_counter() - start < TIMEOUT:
        for news in engine.poll():
            if news.handle == handle and news.state is not TransferState.DONE:
                raise SystemExit(f"a read has failed: {news.reason}")
            if news.handle == handle:
                return time.perf_counter() - start
        time.sleep(0.0002)
    raise SystemExit(f"a read has not ended after {TIMEOUT:g} s")


@contextlib.contextmanager
def checked(buffers: list[np.ndarray], tokens: int) -> Iterator[None]:
    """Clear the reader's pool, and see what is there afterwards."""
    for one in buffers:
        one[:] = 255
    yield
    found = [int((one == number).sum()) for number, one in enumerate(buffers)]
    assert found == [tokens * SLOT] * REGIONS, "a read has brought other bytes"


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of each row's runs."""
    nbytes = args.tokens * SLOT * REGIONS
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    source = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, args.engines, args.tokens))
    source.start()
    descriptions, place, port = ours.recv()
    buffers, regions = pool(args.tokens)
    made = {name: build(name, regions) for name in args.engines}
    for name, one in made.items():
        one.connect("source", "127.0.0.1", descriptions[name])
    raw = RawNixl(regions) if place else None
    plain = Plain(port, nbytes)
    rows: dict[str, list[float]] = {}
    for run in range(args.runs + 1):
        times = {"socket": plain.run(run)}
        for what, (wanted, target) in reads(args.tokens, run).items():
            for name, engine in made.items():
                with checked(buffers, args.tokens):
                    times[f"{name} {what}"] = read(engine, wanted, target)
            if raw is not None and what != HEADS:
                with checked(buffers, args.tokens):
                    times[f"{RAW}{what}"] = raw.read(place, wanted, target)
        if run:
            for name, seconds in times.items():
                rows.setdefault(name, []).append(seconds)
    for one in made.values():
        one.close()
    plain.close()
    source.join()
    return rows


def ratio(base: list[float], seconds: list[float]) -> float:
    """Return how much faster than another row one is."""
    return statistics.median(other / own for other, own in zip(base, seconds, strict=True))


def report(rows: dict[str, list[float]], nbytes: int) -> dict[str, dict[str, float]]:
    """Print and return medians, and ratios to the plain socket's speed."""
    found = {}
    print(f"{'row':16} {'ms':>8} {'GB/s':>7} {'x socket':>9} {'x raw':>6}")
    for name, seconds in rows.items():
        median = statistics.median(seconds)
        one = found[name] = {"ms": median * 1e3, "gb_per_s": nbytes / median / 1e9}
        one["ratio"], to_raw = ratio(rows["socket"], seconds), ""
        if raw := rows.get(f"{RAW}{name.split()[-1]}") if has_nixl([name.split()[0]]) else None:
            one["to_raw"] = ratio(raw, seconds)
            to_raw = f"{one['to_raw']:6.2f}"
        print(f"{name:16} {median * 1e3:8.1f} {nbytes / median / 1e9:7.2f} {one['ratio']:9.2f} {to_raw}".rstrip())
    return found


def main(words: Sequence[str] | None = None) -> None:
    args = arguments(words)
    nbytes = args.tokens * SLOT * REGIONS
    print(f"{nbytes / 1e6:.0f} MB, {args.runs} runs, on {machine()}")
    rows = measure(args)
    found = report(rows, nbytes)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows, "medians": found}, indent=1))


if __name__ == "__main__":
    main()
