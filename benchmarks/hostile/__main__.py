"""What one client may cost the others: attacks on a server, each by four clients beside eight honest streams.

    python benchmarks/attacks.py                                  # every attack, on this checkout: 20 minutes
    python benchmarks/attacks.py --against /path/to/checkout      # the other one first: before and after
    python benchmarks/attacks.py --only big_message stops --seconds 10

Each attack gets a server of its own with the demo model, ten quiet seconds, and four processes that send it for
`--seconds`; what they have sent by then may take up to `--patience` to be answered. A client whose request is refused
as too large asks for half of it from then on: what a server lets in is an attack, too. /health is asked every 50 ms,
over new connections, from a process of its own. The streams' gaps are those between two arrivals of bytes; the wait for
the first is counted apart, and both count up to the end where nothing comes. Memory is resident, sampled every 50 ms.
Tokens are lost where an answer counts more than it has sent. Then the server gets SIGTERM, with five seconds for what
runs.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.hostile import report
from benchmarks.hostile.attacks import ATTACKS
from benchmarks.hostile.measure import Subject, Times, measure
from benchmarks.peers.measure import machine
from benchmarks.peers.processes import ServerError


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/attacks.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=ATTACKS, default=list(ATTACKS), metavar="NAME", help=", ".join(ATTACKS)
    )
    parser.add_argument("--against", type=Path, metavar="PATH", help="another checkout, or its Python: measured first")
    parser.add_argument("--only-against", action="store_true", help="that one alone")
    parser.add_argument("--seconds", type=float, default=20.0, help="for which attackers send")
    parser.add_argument("--patience", type=float, default=60.0, help="within which their requests have to be answered")
    parser.add_argument("--quiet", type=float, default=10.0, help="seconds of the honest clients alone, before")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where all figures go, after each attack")
    return parser.parse_args(words)


def say(text: str) -> None:
    print(text, flush=True)


def run(args: argparse.Namespace) -> None:
    times = Times(quiet=args.quiet, attack=args.seconds, patience=max(args.patience, args.seconds))
    subjects = [] if args.only_against else [Subject("after" if args.against else "this", Path(sys.executable))]
    if args.against:
        subjects.insert(0, Subject.at("before", args.against))
    data: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "seconds": args.seconds,
        "patience": args.patience,
        "records": [],
    }
    logs = Path(tempfile.mkdtemp(prefix="pegboard-attacks-"))
    say(f"logs of the servers: {logs}")
    for name in args.only:
        for subject in subjects:
            say(f"-- {name}: {subject.name}")
            record: dict[str, Any] = {"attack_name": name, "subject": subject.name}
            try:
                record |= measure(ATTACKS[name], subject, times, logs, say)
            except ServerError as error:
                record["error"] = str(error)
            data["records"].append(record)
            for line in report.details(record):
                say(f"   {line}")
            if args.json:
                args.json.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    say("\n" + report.table(data["records"]))


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    # Ended from outside, it ends its servers as it does after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(args)
    except KeyboardInterrupt:
        say("stopped; servers and clients are ended")
        return 130
    except (ServerError, OSError) as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
