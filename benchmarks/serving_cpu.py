"""What serving costs beside the forward pass: CPU time of the API process and of the scheduler process.

    python benchmarks/serving_cpu.py [--api completions chat native] [--streams 1 8 32] [--step-ms MS] [--json FILE]
    python benchmarks/serving_cpu.py --profile api.prof    # cProfile of the API process, for snakeviz or pstats
    python benchmarks/serving_cpu.py --profile-scheduler scheduler.prof

A real server with the demo model's tokenizer and all stages, except that the model is replaced by one that sleeps for
the time of a step (with --busy it reads memory instead, as a model does) and knows its tokens beforehand. A load tool
with plain sockets streams answers over HTTP, in closed loop, all streams in step. Forward passes are not counted. CPU
time is the kernel's account of every thread in nanoseconds (/proc/PID/task/*/schedstat), so neighbours on the machine
move it little. Each row is measured with long and with short answers: their difference is what a token costs, and what
is left of the short ones is what a request costs. Wake-ups are voluntary context switches.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

STEP_MS = {1: 8.0, 8: 10.0, 32: 24.0}
"""About what the decode steps of the demo model take on two cores of a Sapphire Rapids."""
TEXT = (
    "It was a bright cold day in April, and the clocks were striking thirteen. Winston counted: 1, 2, 3 \u2013 and "
    "then na\u00efve caf\u00e9s opened, \u201cas if nothing had happened\u201d; 你好, said the sign, and it rained. "
    "def area(radius: float) -> float:\n    return 3.14159 * radius ** 2\n\n"
)
PROFILE, STEP, BUSY = "PEGBOARD_BENCH_PROFILE", "PEGBOARD_BENCH_STEP_FILE", "PEGBOARD_BENCH_BUSY"
FORWARD = "forward_cpu_ns"


# ---- the server's side ----------------------------------------------------------------------------------------------


def build(resolved: Any, scratch: Path) -> Any:
    """Return the scheduler with its real stages, and a runner that sleeps: for the scheduler process."""
    from pegboard.core.engine.build import build_scheduler

    built = build_scheduler(resolved, scratch)
    pace(built)
    if profile := os.environ.get(f"{PROFILE}_SCHEDULER"):
        profile_run(profile)
    return built


def pace(built: Any) -> None:
    """Put a runner in place that takes the time written in a file, sleeping, and answers with a text's tokens."""
    import torch

    from pegboard.core.interfaces.forward import ForwardOutput

    ids = torch.tensor(built.tokenizer.encode(TEXT, add_special_tokens=False) * 40)
    clock = Path(os.environ[STEP])
    weights = torch.zeros(25_000_000) if os.environ.get(BUSY) else None
    count, seconds, spent = 0, 0.0, 0

    def execute(batch: Any, sampling: Any, **_: Any) -> ForwardOutput:
        nonlocal count, seconds, spent
        start, began = time.perf_counter(), time.thread_time_ns()
        if batch.forward_mode.is_extend:
            seconds = float(clock.read_text()) / 1000
        count += 1
        sampled = 0 if sampling is None else len(sampling)
        at = count * 7 % 64 + torch.arange(sampled) * 3
        end = start + seconds
        if weights is None:
            time.sleep(max(0.0, end - time.perf_counter()))
        else:
            # What a model does to caches: its weights go through them.
            part = 0
            while time.perf_counter() < end:
                weights[part : part + 250_000].sum()
                part = (part + 250_000) % len(weights)
        found = ForwardOutput(ids[at])
        spent += time.thread_time_ns() - began
        return found

    built.runner.execute = execute
    info = built.scheduler.controls["info"]
    built.scheduler.controls["info"] = lambda args: {**info(args), FORWARD: spent}


def profile_run(path: str) -> None:
    """Profile the scheduler's loop until it ends."""
    import atexit
    import cProfile

    profile = cProfile.Profile(time.thread_time)
    atexit.register(lambda: (profile.disable(), profile.dump_stats(path)))
    profile.enable()


def serve_here(config: str) -> None:
    """`pegboard serve` with the paced scheduler."""
    import cProfile

    from pegboard.core.config.compose import compose
    from pegboard.core.server.serve import serve

    resolved = compose(data=json.loads(config))
    profile = cProfile.Profile(time.thread_time) if os.environ.get(PROFILE) else contextlib.nullcontext()
    with profile:
        serve(resolved, builder="serving_cpu:build")
    if path := os.environ.get(PROFILE):
        profile.dump_stats(path)  # type: ignore[union-attr]


# ---- the books ------------------------------------------------------------------------------------------------------


@dataclass
class Account:
    """CPU nanoseconds, by thread, and wake-ups of one process so far."""

    threads: dict[str, int] = field(default_factory=dict)
    wakeups: int = 0

    @classmethod
    def of(cls, pid: int) -> Account:
        found = cls()
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                ran = int((task / "schedstat").read_text().split()[0])
                name = f"{task.name} {(task / 'comm').read_text().strip()}"
                found.threads[name] = found.threads.get(name, 0) + ran
                status = (task / "status").read_text()
                found.wakeups += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
        return found

    @property
    def cpu(self) -> int:
        return sum(self.threads.values())

    def since(self, before: Account) -> Account:
        threads = {name: ran - before.threads.get(name, 0) for name, ran in self.threads.items()}
        return Account(threads, self.wakeups - before.wakeups)


@dataclass
class Run:
    """One run of a load: what the two processes spent, and what came."""

    requests: int
    tokens: int
    steps: int
    events: int
    reads: int
    api: Account
    scheduler: Account


class Served:
    """A server under test."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, clock: Path) -> None:
        self.process = process
        self.address = urlsplit(url)
        self.clock = clock
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        self.scheduler = next(int(pid) for pid in children if "scheduler_process" in _command(pid))

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://{self.address.netloc}{path}", timeout=30) as answer:
            return json.loads(answer.read())

    def counters(self) -> tuple[int, int]:
        """Decode steps, and CPU nanoseconds of forward passes, so far."""
        found = self.get("/server_info")["scheduler"]
        return int(found["decode_steps"]), int(found[FORWARD])

    def load(self, api: str, streams: int, rounds: int, tokens: int, step_ms: float) -> Run:
        """Send `rounds` requests on each of so many connections, with answers of so many tokens."""
        self.clock.write_text(str(step_ms))
        steps, forward = self.counters()
        api_before, scheduler_before = Account.of(self.process.pid), Account.of(self.scheduler)
        client = Client(self.address.hostname or "", self.address.port or 0, body_of(api, tokens))
        events, reads = client.run(streams, rounds)
        api_spent = Account.of(self.process.pid).since(api_before)
        scheduler_spent = Account.of(self.scheduler).since(scheduler_before)
        requests = streams * rounds
        steps_now, forward_now = self.counters()
        scheduler_spent.threads["forward pass"] = forward - forward_now
        return Run(requests, requests * tokens, steps_now - steps, events, reads, api_spent, scheduler_spent)


def _command(pid: str) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


# ---- the load -------------------------------------------------------------------------------------------------------


def body_of(api: str, tokens: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a streamed request with about 128 tokens of prompt."""
    prompt = (TEXT * 3)[:420]
    common = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    if api == "completions":
        return "/v1/completions", {"prompt": prompt, **common}
    if api == "chat":
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}], **common}
    params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return "/generate", {"text": prompt, "sampling_params": params, "stream": True}


class Client:
    """Plain sockets, one thread: it looks for the end of answers and reads nothing else."""

    END = b"data: [DONE]\n\n\r\n0\r\n\r\n"

    def __init__(self, host: str, port: int, request: tuple[str, dict[str, Any]]) -> None:
        self._where = (host, port)
        path, body = request
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
        self._request = head.encode() + b"\r\n\r\n" + data

    def run(self, streams: int, rounds: int) -> tuple[int, int]:
        """Return events and reads of all answers together."""
        selector = selectors.DefaultSelector()
        sockets = [socket.create_connection(self._where) for _ in range(streams)]
        left = dict.fromkeys(sockets, rounds)
        tails = dict.fromkeys(sockets, b"")
        events = reads = 0
        for one in sockets:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.sendall(self._request)
            selector.register(one, selectors.EVENT_READ)
        while left:
            for key, _ in selector.select():
                one: Any = key.fileobj
                data = one.recv(1 << 16)
                if not data:
                    raise RuntimeError(f"the server closed a connection: {tails[one]!r}")
                reads += 1
                events += data.count(b"data: {")
                tails[one] = (tails[one] + data)[-200:]
                if not tails[one].endswith(b"0\r\n\r\n"):
                    continue
                if self.END not in tails[one] and b"[DONE]" not in tails[one]:
                    raise RuntimeError(f"an answer ended badly: {tails[one]!r}")
                left[one] -= 1
                if left[one]:
                    one.sendall(self._request)
                else:
                    del left[one]
                    selector.unregister(one)
                    one.close()
        return events, reads


@contextlib.contextmanager
def serving(args: argparse.Namespace, directory: Path) -> Iterator[Served]:
    """Run a server around a tiny random model with the demo's tokenizer."""
    clock = directory / "step-ms"
    clock.write_text("1")
    config = {
        "model": {"path": str(model_directory(directory)), "dtype": "float32"},
        "memory": {"max_total_tokens": 40_000},
        "server": {"port": 0},
        "apis": ["openai", "native"],
        "scheduler": {"loop": args.loop} if args.loop else {},
    }
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), STEP: str(clock), "OMP_NUM_THREADS": "1"}
    if args.busy:
        env[BUSY] = "1"
    if args.profile:
        env[PROFILE] = args.profile
    if args.profile_scheduler:
        env[f"{PROFILE}_SCHEDULER"] = args.profile_scheduler
    log = directory / "log"
    with log.open("wb") as out:
        command = [sys.executable, __file__, "--serve", json.dumps(config)]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env)
    try:
        deadline = time.monotonic() + 120
        while "Ready on " not in (said := log.read_text()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{said}")
            time.sleep(0.1)
        yield Served(process, said.partition("Ready on ")[2].split()[0], clock)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def model_directory(directory: Path) -> Path:
    """Return a model of one small layer with the demo's vocabulary, so that texts and tokens are real ones."""
    from pegboard.conformance.checkpoints import tiny_checkpoint
    from pegboard.core.config.compose import compose
    from pegboard.core.config.select import Selection
    from pegboard.core.engine.source import prepare_model

    demo = compose(data={"model": {"path": "demo:smollm2-135m-instruct"}})
    source = prepare_model(demo, Selection(demo))
    vocab = source.tokenizer.vocab_size
    model = tiny_checkpoint(directory, "llama", vocab_size=vocab, num_hidden_layers=1, tie_word_embeddings=True)
    for file in source.directory.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens")) or file.suffix == ".jinja":
            shutil.copy(file, model / file.name)
    return model


# ---- the table ------------------------------------------------------------------------------------------------------


def figures(long: Run, short: Run) -> dict[str, float]:
    """µs of CPU per token (from the difference), per request (what is left), and per step."""
    tokens, n = long.tokens - short.tokens, long.requests
    assert short.requests == n
    found = {"chunks/token": long.events / long.tokens, "reads/token": long.reads / long.tokens}
    steps = max(1, long.steps - short.steps)
    for name in ("api", "scheduler"):
        more, less = getattr(long, name), getattr(short, name)
        token = (more.cpu - less.cpu) / tokens / 1000
        found[f"{name} µs/token"] = token
        found[f"{name} µs/step"] = (more.cpu - less.cpu) / steps / 1000
        found[f"{name} µs/request"] = less.cpu / n / 1000 - token * short.tokens / n
        found[f"{name} wakeups/step"] = (more.wakeups - less.wakeups) / steps
    return found


def threads(run: Run) -> str:
    said = []
    for name in ("api", "scheduler"):
        spent = sorted(getattr(run, name).threads.items(), key=lambda one: -one[1])
        said.append(f"{name}: " + ", ".join(f"{who} {ran / 1e6:.1f}" for who, ran in spent if abs(ran) > 1e5))
    return "; ".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--api", nargs="+", default=["completions", "chat"], choices=["completions", "chat", "native"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--step-ms", type=float, help="time of a step; by default, that of the demo model")
    parser.add_argument("--output", type=int, default=128, help="tokens of the long answers")
    parser.add_argument("--short", type=int, default=16, help="tokens of the short ones")
    parser.add_argument("--rounds", type=int, help="requests per stream; by default, 8 and fewer with many streams")
    parser.add_argument("--loop", help="scheduler.loop")
    parser.add_argument(
        "--busy", action="store_true", help="a forward pass reads memory, on one core, and does not sleep"
    )
    parser.add_argument("--threads", action="store_true", help="print what each thread spent, in ms")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--profile", metavar="FILE")
    parser.add_argument("--profile-scheduler", metavar="FILE")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve_here(args.serve)
        return
    rows = []
    with tempfile.TemporaryDirectory(prefix="pegboard-serving-cpu-") as name, serving(args, Path(name)) as served:
        for api in args.api:
            served.load(api, 4, 2, 8, 1.0)
        time.sleep(1)
        before = Account.of(served.process.pid), Account.of(served.scheduler)
        time.sleep(3)
        pids = served.process.pid, served.scheduler
        idle = [Account.of(pid).since(old).cpu / 3e3 for pid, old in zip(pids, before, strict=True)]
        print(f"idle: API process {idle[0]:.0f} µs/s, scheduler process {idle[1]:.0f} µs/s")
        columns = ("api µs/token", "api µs/step", "api µs/request", "api wakeups/step", "scheduler µs/step",
                   "scheduler µs/request", "scheduler wakeups/step", "chunks/token", "reads/token")  # fmt: skip
        print(f"{'api':<12}{'streams':>8}" + "".join(f"{one.replace('scheduler', 'sched'):>22}" for one in columns))
        for api in args.api:
            for streams in args.streams:
                step = args.step_ms if args.step_ms is not None else STEP_MS.get(streams, 10.0)
                rounds = args.rounds or max(2, 8 // streams)
                long = served.load(api, streams, rounds, args.output, step)
                short = served.load(api, streams, rounds, args.short, step)
                found = figures(long, short)
                rows.append({"api": api, "streams": streams, **found})
                print(f"{api:<12}{streams:>8}" + "".join(f"{found[one]:>22.2f}" for one in columns), flush=True)
                if args.threads:
                    print("   ", threads(long))
    if args.json:
        Path(args.json).write_text(json.dumps({"idle µs/s": idle, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
