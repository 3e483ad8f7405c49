"""A model's config.json, with its values checked: by type, and against what no model has.

What is wrong is known before anything is built from it, and named by file, key and value. Sizes have upper bounds far
above any model's, because Python objects, tables and memory are made of them before weights can tell that they are
wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pegboard.core.interfaces.errors import ModelError
from pegboard.toolkit.model.hf_files import read_json_object
from pegboard.toolkit.model.kv_config import weights_are_plain

_LAYERS, _WIDTH, _HEADS, _VOCABULARY, _POSITIONS, _EXPERTS = 1024, 2**24, 2**16, 2**28, 2**31 - 1, 2**16

LARGEST: Mapping[str, int] = {
    "num_hidden_layers": _LAYERS,
    "num_layers": _LAYERS,
    "n_layers": _LAYERS,
    "n_layer": _LAYERS,
    "hidden_size": _WIDTH,
    "d_model": _WIDTH,
    "n_embd": _WIDTH,
    "intermediate_size": _WIDTH,
    "head_dim": _WIDTH,
    "num_attention_heads": _HEADS,
    "n_heads": _HEADS,
    "n_head": _HEADS,
    "num_key_value_heads": _HEADS,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": _POSITIONS,
    "n_positions": _POSITIONS,
    "original_max_position_embeddings": _POSITIONS,
    "sliding_window": _POSITIONS,
    "num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "num_experts_per_tok": _EXPERTS,
    "moe_intermediate_size": _WIDTH,
    "decoder_sparse_step": _LAYERS,
}
"""The largest value of a size. Positions are 32-bit numbers."""

# Keys that mean the same in every architecture.
_SIZES_EVERYWHERE = (
    *("num_hidden_layers", "num_layers", "n_layers", "n_layer", "hidden_size", "d_model", "n_embd"),
    *("num_attention_heads", "n_heads", "n_head", "vocab_size", "max_position_embeddings", "n_positions"),
)
_NUMBERS_EVERYWHERE = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "rope_theta")


def read_model_config(directory: Path) -> dict[str, Any]:
    """Read the config.json of a model directory. Where it does not say how weights or KV are quantised, and ModelOpt's
    hf_quant_config.json does, that is its `quantization_config`.

    Raises ModelError where it is missing, is not a JSON object, or holds what no model's config can.
    """
    file = directory / "config.json"
    if not file.is_file():
        raise ModelError(f"{directory} has no config.json, so it is not a model directory")
    config = read_json_object(file)
    check_model_config(config, str(file))
    if not config.get("quantization_config") and (told := _told_apart(directory)):
        config["quantization_config"] = told
    return config


def _told_apart(directory: Path) -> Mapping[str, object]:
    """Return what older exports of ModelOpt say of quantised weights and KV in a file of its own; empty for neither."""
    # Of the two objects in it, `producer` says what wrote the file, and the other how weights and KV are quantised.
    for told in read_json_object(directory / "hf_quant_config.json").values():
        if isinstance(told, Mapping) and (told.get("quant_algo") or weights_are_plain(told)):
            return told
    return {}


def check_model_config(config: Mapping[str, object], file: str = "config.json") -> None:
    """Raise ModelError, naming `file`, for values of common keys that no architecture can have."""
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ModelError(f"{file}: architectures must be a list of names, found {names!r:.80}")
    for key in ("model_type", "dtype", "torch_dtype"):
        if not isinstance(config.get(key), str | None):
            raise ModelError(f"{file}: {key} must be a name, found {config[key]!r:.80}")
    for key in ("text_config", "quantization_config"):
        if not isinstance(config.get(key), Mapping | None):
            raise ModelError(f"{file}: {key} must be an object, found {config[key]!r:.80}")
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        for key in LARGEST:
            # Some of them are lists, or 0 for none, in some architectures.
            if isinstance(value := part.get(key), int) and value > 0:
                size(part, key, file=file)
        for key in _SIZES_EVERYWHERE:
            if part.get(key) is not None:
                size(part, key, file=file)
        for key in _NUMBERS_EVERYWHERE:
            if part.get(key) is not None:
                number(part, key, file=file)


def size(config: Mapping[str, object], key: str, default: int | None = None, *, file: str = "config.json") -> int:
    """Return the positive integer of a key, `default` where it is absent or null. Raises ModelError for anything else,
    and above the key's `LARGEST`.
    """
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"{file}: {key} must be a positive integer, found {value!r:.80}")
    if value > LARGEST[key]:
        raise ModelError(f"{file}: {key} must be at most {LARGEST[key]}, found {value!r:.80}; no model has that many")
    return value


def number(config: Mapping[str, object], key: str, default: float | None = None, *, file: str = "config.json") -> float:
    """Return the positive, finite number of a key, `default` where it is absent or null. Raises ModelError
    otherwise.
    """
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"{file}: {key} must be a positive number, found {value!r:.80}")
    return float(value)


def flag(config: Mapping[str, object], key: str, default: bool = False, *, file: str = "config.json") -> bool:
    """Return the true or false of a key, `default` where it is absent or null. Raises ModelError for anything else."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f"{file}: {key} must be true or false, found {value!r:.80}")
    return value
