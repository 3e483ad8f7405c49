"""What pictures cost, in ratios of one run on this machine.

    python -m benchmarks.multimodal                    # all four parts: about five minutes on two cores
    python -m benchmarks.multimodal --only text --against ../before    # text models beside an earlier checkout
    python -m benchmarks.multimodal --quick            # a minute, to see that it works; figures mean little

text: chats without pictures on a model that takes them, beside its text tower as a model of its own.
streams: time between tokens of 8 streams while pictures of a megapixel arrive, beside texts of as many tokens.
transport: pixels in a file beside patches in the message, in bytes and in time of the processor.
again: time to the first token for a picture that was seen before.

Models are random, of Qwen3-VL's architecture, in bfloat16. What is compared takes turns within one run, so that the
machine's other users meet both. Figures are medians over the rounds, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.multimodal import again, interference, report, text, transport
from benchmarks.multimodal.served import serve_watched
from benchmarks.peers.measure import machine
from benchmarks.peers.processes import checkout_python
from pegboard.tools.bench.images import ImageSize

PARTS = ("text", "streams", "transport", "again")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.multimodal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument(
        "--against", type=Path, metavar="PATH", help="text: the tower on another checkout with a .venv, in turn, too"
    )
    parser.add_argument("--rounds", type=int, help="repetitions of what takes turns")
    parser.add_argument("--quick", action="store_true", help="tiny models and few requests, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def parts(args: argparse.Namespace) -> dict[str, Callable[[Path], dict[str, Any]]]:
    """Return what is to be measured, by name."""
    before = str(checkout_python(args.against)) if args.against else ""
    chats = text.TextPlan(before=before, rounds=args.rounds or 5)
    streams = interference.Plan(rounds=args.rounds or 3)
    shown = again.Plan()
    sizes: Sequence[ImageSize] = transport.SIZES
    model, times = "small", 15
    if args.quick:
        chats = dataclasses.replace(chats, size="tiny", rounds=args.rounds or 2, requests=8, streams=4, output=8)
        small = ImageSize(256, 256)
        streams = dataclasses.replace(streams, size="tiny", rounds=1, streams=2, seconds=2.0, image=small)
        shown = dataclasses.replace(shown, size="tiny", times=2, image=small, depth=2)
        sizes, model, times = sizes[:1], "tiny", 3
    return {
        "text": lambda folder: text.measure(chats, folder),
        "streams": lambda folder: interference.measure(streams, folder),
        "transport": lambda folder: transport.measure(folder, model, sizes, times),
        "again": lambda folder: again.measure(shown, folder),
    }


def main() -> None:
    args = arguments()
    if args.serve:
        serve_watched(args.serve)
        return
    known = parts(args)
    found: dict[str, Any] = {"machine": machine(), "quick": args.quick, "words": sys.argv[1:]}
    for name in args.only:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="pegboard-multimodal-models-") as folder:
            found[name] = known[name](Path(folder))
        print(report.table(name, found[name]), flush=True)
        print(f"({time.monotonic() - began:.0f} s)\n", flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
