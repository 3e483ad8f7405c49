"""What flags and keys of other servers are called here."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

import yaml


@dataclass(frozen=True, slots=True)
class Answer:
    """What another server's name is here: `key`, a dotted path or "", and a `note` on how it differs or what to do."""

    key: str = ""
    note: str = ""

    def told(self, use: str) -> str:
        """Return it, after what says how `key` is used: ``use --set memory.gpu_share=... (of what is left)``."""
        return self.note if not self.key else f"{use} ({self.note})" if self.note else use


@functools.cache
def answers_of(table: str) -> Mapping[str, Answer]:
    """Return the answers of a YAML file, ``package:file``, by names in small letters with underscores.

    Its keys are names with spaces between. Each has the `key` that it is here, a `note`, or what is `missing`.
    """
    package, _, file = table.partition(":")
    found = {}
    for names, said in yaml.safe_load((resources.files(package) / file).read_text("utf-8")).items():
        missing = said.pop("missing", "")
        answer = Answer(note=f"not supported yet: {missing} (docs/limits.md)") if missing else Answer(**said)
        found.update(dict.fromkeys(names.split(), answer))
    return found
