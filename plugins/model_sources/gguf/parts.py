"""Models that llama.cpp's gguf-split has cut into several files: NAME-00001-of-00003.gguf and so on.

The first part has the metadata, and each has some of the tensors.
"""

from __future__ import annotations

import re
from pathlib import Path

from pegboard.core.interfaces.errors import ModelError

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)
_SHOWN = 3


def part_files(file: Path) -> list[Path]:
    """Return all parts of the model of which `file` is one, in order; `file` alone where its name is not a part's.
    Raises ModelError naming the parts that are missing.
    """
    match = _NAME.fullmatch(file.name)
    count = int(match["count"]) if match else 1
    if match is None or count < 2:
        return [file]
    names = [f"{match['stem']}-{number:05d}-of-{match['count']}{match['suffix']}" for number in range(1, count + 1)]
    if missing := [name for name in names if not (file.parent / name).is_file()]:
        told = ", ".join(missing[:_SHOWN]) + (f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else "")
        raise ModelError(
            f"{file} is a part of a model in {count} files, of which {told} "
            f"{'is' if len(missing) == 1 else 'are'} not beside it; fetch all parts into one folder"
        )
    return [file.parent / name for name in names]


def check_part(path: Path, said: object, of: object, index: int, count: int) -> None:
    """Raise ModelError unless a file is the part `index` (from 0) of `count`, where its metadata say that it is part
    `said` (split.no) of `of` (split.count); None where they do not say.
    """
    if count == 1 and isinstance(of, int) and of > 1:
        raise ModelError(
            f"{path} is part {_ordinal(said)} of a model in {of} files (split.count), and its name does not say "
            f"so: name all parts like {path.stem}-00001-of-{of:05d}.gguf, or join them (llama-gguf-split --merge)"
        )
    if count > 1 and (said, of) != (index, count):
        raise ModelError(
            f"{path} should be part {index + 1} of {count}, and says that it is part {_ordinal(said)} of {of} "
            "(split.no, split.count); fetch all parts of one model"
        )


def _ordinal(number: object) -> object:
    return number + 1 if isinstance(number, int) else number
