"""``python -m tests.e2e.explore ADDRESS KEY EXAMPLES SEED [SKIP...]``: schemathesis against a server, on its document.

A process of its own: pytest would rewrite all of schemathesis' modules when they are imported, because it brings a
plugin for pytest. Prints JSON: how many requests were made, and what was found, each with a command that shows it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import httpx

PATIENCE = 60.0
UNBOUND = ("positive_data_acceptance", "negative_data_rejection")
"""Checks that do not apply: fields may be in conflict, which a schema does not say; null stands for a default, and what
nobody knows is ignored, which it does not say either.
"""


def explore(address: str, key: str, *, examples: int, seed: int = 1, skip: Sequence[str] = ()) -> tuple[int, list[str]]:
    """Try the server with `key`, which must open everything: every boundary of every field, what is beyond it, and
    `examples` random requests per route. Paths to `skip` are left alone.
    """
    arguments = [address, key, str(examples), str(seed), *skip]
    command = [sys.executable, "-m", "tests.e2e.explore", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    result = json.loads(done.stdout.splitlines()[-1])
    return result["requests"], result["found"]


def _explore(address: str, key: str, examples: int, seed: int, skip: Sequence[str]) -> dict[str, Any]:
    from schemathesis import openapi
    from schemathesis.config import SchemathesisConfig
    from schemathesis.engine import events, from_schema

    answer = httpx.get(f"{address}/openapi.json", headers={"x-api-key": key}, timeout=PATIENCE)
    config = SchemathesisConfig.from_dict(
        {
            "seed": seed,
            "base-url": address,
            "request-timeout": PATIENCE,
            "auth": {"openapi": {"bearer": {"bearer": key}}},
            "generation": {"deterministic": seed == 1, "max-examples": examples, "database": "none"},
            "checks": {name: {"enabled": False} for name in UNBOUND},
            "phases": {"stateful": {"enabled": False}},
        }
    )
    document = answer.json()
    for path in skip:
        del document["paths"][path]
    requests, found = 0, []
    for one in from_schema(openapi.from_dict(document, config=config)).execute():
        if isinstance(one, events.NonFatalError):
            found.append(f"{one.label}: {one.value}")
        elif isinstance(one, events.FatalError):
            raise one.exception
        elif isinstance(one, events.ScenarioFinished):
            requests += len(one.recorder.interactions)
            checks = [
                check for some in one.recorder.checks.values() for check in some if check.failure_info is not None
            ]
            for check in checks:
                failure, sample = check.failure_info.failure, check.failure_info.code_sample  # type: ignore[union-attr]
                found.append(f"{one.label}: {failure.title}: {failure.message}\n{sample}")
    return {"requests": requests, "found": found}


if __name__ == "__main__":
    address, key, examples, seed, *skip = sys.argv[1:]
    sys.stdout.write("\n" + json.dumps(_explore(address, key, int(examples), int(seed), skip)) + "\n")
