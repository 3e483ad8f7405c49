"""Weights: safetensors only, in the dtype that was asked for, and nothing left at random values."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from pegboard.core.interfaces.errors import ModelError
from pegboard.plugins.model_transformers import bridge
from pegboard.plugins.model_transformers.trace import config_of

if TYPE_CHECKING:
    from pegboard.core.interfaces.model_family import ModelContext

logger = logging.getLogger(__name__)

_SHOWN = 5
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def load_model(ctx: ModelContext) -> Any:
    """The causal language model of `ctx`, with its weights, on `ctx.device`, calling our attention.

    Raises ModelError naming file, tensor and shapes where the checkpoint does not fit its config.
    """
    from transformers import AutoModelForCausalLM

    files = weight_files(ctx.directory)
    bridge.register()
    try:
        with _quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                str(ctx.directory),
                config=config_of(ctx.hf_config),
                dtype=ctx.dtype,
                attn_implementation=bridge.PAGED,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # so that they are reported, below
                output_loading_info=True,
            )
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as err:
        raise ModelError(f"{ctx.directory}: {ctx.architecture} cannot be loaded: {err}") from err
    _check_loaded(ctx, files, info)
    return model.eval().requires_grad_(False).to(ctx.device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and its report of missing tensors, which we raise instead."""
    from transformers.utils import logging as hf_logging

    bars, level = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint, each readable.

    Raises ModelError where there are none, where one that the index names is missing, or where one is damaged.
    """
    index = directory / _INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as err:
            raise ModelError(f"{index}: not the index of a sharded checkpoint: {err!r}") from err
    else:
        names = [_SINGLE]
    files = tuple(directory / name for name in names)
    for file in files:
        if not file.exists():
            hint = "" if index.exists() else "; only safetensors are read (convert pickled weights first)"
            raise ModelError(f"{file}: the file is missing{hint}")
        _names_in(file)
    return files


def _names_in(file: Path) -> frozenset[str]:
    try:
        with safe_open(str(file), framework="pt") as tensors:
            return frozenset(tensors.keys())
    except SafetensorError as err:
        raise ModelError(f"{file}: damaged, or no safetensors file: {err}") from err


def _check_loaded(ctx: ModelContext, files: tuple[Path, ...], info: dict[str, Any]) -> None:
    mismatched = sorted((tuple(entry) for entry in info.get("mismatched_keys") or ()), key=str)
    problems = [
        f"{_file_of(name, files)}: tensor {name} has shape {list(found)}, config.json asks for {list(wanted)}"
        for name, found, wanted in mismatched
    ]
    missing = sorted(info.get("missing_keys") or ())
    problems += [f"{ctx.directory}: tensor {name} is missing" for name in missing]
    problems += [f"{ctx.directory}: {message}" for message in _messages(info.get("error_msgs"))]
    if problems:
        more = len(problems) - _SHOWN
        shown = problems[:_SHOWN] + ([f"... and {more} more"] if more > 0 else [])
        raise ModelError("the checkpoint does not fit its config: " + "; ".join(shown))
    unexpected = sorted(info.get("unexpected_keys") or ())
    if unexpected:
        logger.warning("%s: %d tensors are not used, among them %s", ctx.directory, len(unexpected), unexpected[0])


def _messages(errors: Any) -> list[str]:
    return [errors] if isinstance(errors, str) and errors else [str(error) for error in errors or ()]


def _file_of(name: str, files: tuple[Path, ...]) -> Path:
    """The file that holds a tensor, under its name or, where transformers renamed it, the first one."""
    for file in files:
        if any(found == name or name.endswith(f".{found}") or found.endswith(f".{name}") for found in _names_in(file)):
            return file
    return files[0]
