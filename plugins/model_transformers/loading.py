"""Weights: safetensors only, in the dtype that was asked for, and nothing left at random values."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError

from pegboard.core.interfaces.errors import ModelError
from pegboard.plugins.model_transformers import bridge, experts
from pegboard.plugins.model_transformers.configs import auto_class, config_of, own_class
from pegboard.plugins.model_transformers.merged import CodedLinears
from pegboard.plugins.model_transformers.rope import hold_rope_still
from pegboard.toolkit.model.coded import QuantizedWeights, StoredSlot, quantized_weights, slots_of
from pegboard.toolkit.model.weights import CODES, StoredTensor, checkpoint_files, read_header, unexplained
from pegboard.toolkit.system.progress import progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pegboard.core.interfaces.model_family import ModelContext

logger = logging.getLogger(__name__)

_SHOWN = 5

_Files = Mapping[Path, Mapping[str, StoredTensor]]
"""What each file of a checkpoint holds."""


def load_model(
    ctx: ModelContext, parameters: int, linears: Collection[str], stacked: Mapping[str, torch.nn.Module]
) -> tuple[torch.nn.Module, CodedLinears]:
    """Return the causal language model of `ctx`, with its weights, on `ctx.device`, calling our attention; and those of
    its linear layers `linears` whose weights are quantised: they have none, and stay codes. So do those modules of
    experts whose matrices the checkpoint has in one tensor; `stacked` are such modules by name, without weights.

    `parameters` are the numbers in all weights that its config asks for. A checkpoint with less than half of them is
    refused before there is memory for them; one that lacks single tensors is refused by their names, once the others
    are read.

    Raises ModelError naming file, tensor and shapes where the checkpoint does not fit its config.
    """
    weights = quantized_weights(ctx)
    files = _files_of(ctx, parameters if weights is None else 0)
    if weights is None:
        _check_plain(files)
    bridge.register()
    experts.register()
    kept = _kept(weights, linears, stacked)
    model, info = _read(ctx, weights, kept, {*linears, *stacked})
    _check_loaded(ctx, files, info)
    loaded = model.eval().requires_grad_(False)
    hold_rope_still(loaded)
    if weights is not None:
        _use_codes(loaded, ctx, weights, kept)
    return loaded.to(ctx.device), CodedLinears(kept.linears, weights)


def _read(
    ctx: ModelContext, weights: QuantizedWeights | None, kept: _Kept, modules: Collection[str]
) -> tuple[torch.nn.Module, dict[str, object]]:
    """Return the model on the CPU, and what transformers tells of its reading. `modules` are names of its linear layers
    and modules of experts.
    """
    try:
        with _quiet(), progress("reading weights"):
            return _reader_of(ctx)(
                str(ctx.directory) if weights is None else None,
                state_dict=None if weights is None else _dequantized(ctx, weights, kept, modules),
                config=config_of(ctx.hf_config),
                dtype=ctx.dtype,
                attn_implementation=bridge.PAGED,
                experts_implementation=experts.EXPERTS,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # so that they are reported, below
                output_loading_info=True,
            )
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as err:
        raise ModelError(f"{ctx.directory}: {ctx.architecture} cannot be loaded: {err}") from err


def _files_of(ctx: ModelContext, parameters: int) -> _Files:
    """Return what each file of the checkpoint holds. Raises ModelError where that is less than half of `parameters`."""
    files = {file: read_header(file) for file in checkpoint_files(ctx.directory)}
    stored = sum(math.prod(tensor.shape) for tensors in files.values() for tensor in tensors.values())
    if parameters > 2 * stored:
        raise ModelError(
            f"the checkpoint does not fit its config: {ctx.directory / 'config.json'} asks for {parameters} numbers, "
            f"and the *.safetensors beside it hold {stored}"
        )
    return files


def _check_plain(files: _Files) -> None:
    """Raise ModelError for a matrix of codes, which transformers would convert to the model's type as if they were
    numbers. Biases of two dimensions are masks: GPT-NeoX's files have bytes of such.
    """
    for file, tensors in files.items():
        for name, tensor in tensors.items():
            if _is_codes(name, tensor):
                raise StoredSlot(name, file, tensor).wrong(unexplained(tensor.dtype))


def _is_codes(name: str, tensor: StoredTensor) -> bool:
    return tensor.dtype in CODES and len(tensor.shape) >= 2 and not name.endswith("bias")


class _Kept(NamedTuple):
    """Names of linear layers, and of modules of experts, whose weights stay codes."""

    linears: frozenset[str]
    experts: frozenset[str]

    def has(self, name: str) -> bool:
        """Return whether a tensor is the weight of one of them."""
        return name.removesuffix(".weight") in self.linears or name.rpartition(".")[0] in self.experts


def _kept(weights: QuantizedWeights | None, linears: Collection[str], stacked: Mapping[str, torch.nn.Module]) -> _Kept:
    if weights is None:
        return _Kept(frozenset(), frozenset())
    matrices, is_experts, fits = weights.matrices, experts.is_experts, experts.fits_codes
    coded = (name for name in linears if f"{name}.weight" in matrices)
    return _Kept(
        frozenset(coded),
        frozenset(name for name, module in stacked.items() if is_experts(module) and fits(name, module, matrices)),
    )


def _use_codes(model: torch.nn.Module, ctx: ModelContext, weights: QuantizedWeights, kept: _Kept) -> None:
    """Empty the weights of what stays codes, and have experts multiply by theirs on the device."""
    for name in kept.linears:
        linear = model.get_submodule(name)
        linear.weight = torch.nn.Parameter(torch.empty(0, dtype=ctx.dtype), requires_grad=False)
    for name in sorted(kept.experts):
        module = model.get_submodule(name)
        assert experts.is_experts(module)
        experts.keep_codes(name, module, weights, ctx.device)


def _reader_of(ctx: ModelContext) -> Callable[..., tuple[torch.nn.Module, dict[str, object]]]:
    """Return what reads a checkpoint: `from_pretrained` of the model's own class for quantised weights, which come as
    tensors.
    """
    import transformers

    coded = quantized_weights(ctx) is not None
    reader = _own_class(ctx) if coded else getattr(transformers, auto_class(ctx.hf_config))
    read: Callable[..., tuple[torch.nn.Module, dict[str, object]]] = reader.from_pretrained
    return read


def _own_class(ctx: ModelContext) -> type[PreTrainedModel]:
    import transformers

    found: type[PreTrainedModel] = getattr(transformers, own_class(ctx.hf_config, ctx.architecture))
    return found


def _dequantized(
    ctx: ModelContext, weights: QuantizedWeights, kept: _Kept, modules: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint by name: exact numbers, in the model's type, of those that are quantised, and
    for those that stay codes tensors without memory. Raises ModelError for a matrix of codes that no format explains,
    whose numbers would be taken for weights. Layers that the model's class ignores are left out.
    """
    found = {}
    ignored = ignored_layers(_own_class(ctx)._keys_to_ignore_on_load_unexpected or (), modules)
    for name, slot in slots_of(ctx.directory).items():
        if name not in weights.parts and not ignored(name):
            if _is_codes(name, slot.tensor):
                raise slot.wrong(unexplained(slot.dtype))
            found[name] = slot.read()
    for name, matrix in weights.matrices.items():
        if kept.has(name):
            found[name] = torch.zeros((), dtype=ctx.dtype).expand(matrix.shape)
        elif not ignored(name):
            found[name] = torch.empty(matrix.shape, dtype=ctx.dtype)
            matrix.fill(found[name])
    return found


_LAYER = re.compile(r".*?\.\d+\.")
"""What a name has of its layer, up to the first number."""


def ignored_layers(patterns: Iterable[str], modules: Collection[str]) -> Callable[[str], bool]:
    """Return what says of a tensor's name whether its layer is none of the model's and the model's class ignores it,
    by one of `patterns`: the layers for multi-token prediction of DeepSeek-V3, GLM-4.5 and Qwen3-Next.

    Patterns alone do not suffice: those of GLM-4.5 include layer 46, which GLM-4.5-Air does not use and GLM-4.5 does.
    `modules` are names in the model, at least one of each layer.
    """
    layers = {found[0] for name in modules if (found := _LAYER.match(f"{name}."))}
    compiled = [re.compile(pattern) for pattern in patterns]

    def ignored(name: str) -> bool:
        layer = _LAYER.match(name)
        return layer is not None and layer[0] not in layers and any(one.search(name) for one in compiled)

    return ignored


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


def _check_loaded(ctx: ModelContext, files: _Files, info: dict[str, Any]) -> None:
    mismatched = sorted((tuple(entry) for entry in info.get("mismatched_keys") or ()), key=str)
    problems = []
    for renamed, found, wanted in mismatched:
        name = _stored_name(ctx, renamed)
        shapes = f"has shape {list(found)}, config.json asks for {list(wanted)}"
        problems.append(f"{_file_of(name, files)}: tensor {name} {shapes}")
    missing = sorted(info.get("missing_keys") or ())
    problems += [f"{ctx.directory}: tensor {_stored_name(ctx, name)} is missing" for name in missing]
    problems += [f"{ctx.directory}: {message}" for message in _messages(info.get("error_msgs"))]
    if problems:
        more = len(problems) - _SHOWN
        shown = problems[:_SHOWN] + ([f"... and {more} more"] if more > 0 else [])
        raise ModelError("the checkpoint does not fit its config: " + "; ".join(shown))
    unexpected = sorted(info.get("unexpected_keys") or ())
    if unexpected:
        logger.warning("%s: %d tensors are not used, among them %s", ctx.directory, len(unexpected), unexpected[0])


def _stored_name(ctx: ModelContext, name: str) -> str:
    """Return the checkpoint's name of a tensor that transformers has renamed as a whole, such as Mixtral's router."""
    from transformers.conversion_mapping import WeightRenaming, get_checkpoint_conversion_mapping

    for change in get_checkpoint_conversion_mapping(str(ctx.hf_config.get("model_type"))) or ():
        if isinstance(change, WeightRenaming):
            for ours, theirs in zip(change.source_patterns, change.target_patterns, strict=False):
                if theirs.strip(".").isidentifier() and theirs in name:
                    return name.replace(theirs, ours)
    return name


def _messages(errors: Any) -> list[str]:
    return [errors] if isinstance(errors, str) and errors else [str(error) for error in errors or ()]


def _file_of(name: str, files: _Files) -> Path:
    """Return the file that holds a tensor, under its name or, where transformers renamed it, the first one."""
    for file, tensors in files.items():
        if any(found == name or name.endswith(f".{found}") or found.endswith(f".{name}") for found in tensors):
            return file
    return next(iter(files))
