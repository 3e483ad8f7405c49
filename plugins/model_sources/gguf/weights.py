"""A GGUF file's tensors as safetensors under Hugging Face's names: float32, or the codes of quantised ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from pegboard.core.interfaces.errors import ModelError
from pegboard.plugins.model_sources.gguf.codes import Array, keeps_codes, kept
from pegboard.plugins.model_sources.gguf.metadata import GGUFFile
from pegboard.toolkit.system.progress import progress

SHARD_BYTES = 200_000_000
"""A shard is closed once it holds this much, so that no more than one is in memory."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IGNORED = frozenset({"rope_freqs.weight"})
_NAME = re.compile(r"(?:blk\.(?P<block>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")


Scalar = TypeVar("Scalar", bound=np.generic)


def write_weights(file: GGUFFile, config: Mapping[str, Any], directory: Path, codes: bool = False) -> None:
    """Write model-*.safetensors and model.safetensors.index.json tensor by tensor, dequantised but for those whose
    `codes` can be kept.

    Raises ModelError for a tensor without a counterpart, and for a file that lacks tensors its metadata promises.
    """
    _check_complete(file, config)
    shards: list[list[str]] = []
    pending: dict[str, Array | NDArray[np.float32]] = {}
    total = held = 0

    def close_shard() -> None:
        # Not by the library's save_file: it has an error of its own for a full disk.
        (directory / f"part-{len(shards)}.safetensors").write_bytes(save(pending, metadata={"format": "pt"}))
        shards.append(list(pending))
        pending.clear()

    with progress("converting the GGUF file", sum(tensor.n_elements for tensor in file.tensors.values())) as converted:
        for name, values in _converted(file, config, codes):
            if pending and held + values.nbytes > SHARD_BYTES:
                close_shard()
                held = 0
            pending[name] = values
            held += values.nbytes
            total += values.nbytes
            converted(values.size)
        close_shard()
    _write_index(directory, shards, total)


def _write_index(directory: Path, shards: list[list[str]], total: int) -> None:
    if len(shards) == 1:
        (directory / "part-0.safetensors").rename(directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        final = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"part-{number}.safetensors").rename(directory / final)
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def hf_name(gguf_name: str) -> str | None:
    """Return the Hugging Face name of a dense decoder's tensor, None where there is none."""
    match = _NAME.fullmatch(gguf_name)
    if match is None:
        return None
    table = _TOP if match["block"] is None else _BLOCK
    part = table.get(match["part"])
    if part is None:
        return None
    prefix = "" if match["block"] is None else f"model.layers.{match['block']}."
    return f"{prefix}{part}.{match['kind']}"


def _converted(
    file: GGUFFile, config: Mapping[str, Any], codes: bool
) -> Iterator[tuple[str, Array | NDArray[np.float32]]]:
    permuted = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name in file.tensors:
        if name in _IGNORED:
            continue
        target = hf_name(name)
        if target is None:
            raise ModelError(f"{file.path}: tensor {name} has no place in a {config['model_type']} model")
        heads = permuted.get(name.split(".")[-2]) if file.architecture == "llama" else None
        if codes and keeps_codes(file.tensors[name]):
            rows = np.arange(int(file.tensors[name].shape[1]))
            order = rows if heads is None else unpermute(rows, heads)
            for role, array in kept(file.tensors[name]).items():
                yield f"{target.removesuffix('weight')}{role}", array[order]
            continue
        values = file.dequantized(name)
        yield target, values if heads is None else unpermute(values, heads)


def unpermute(weight: NDArray[Scalar], num_heads: int) -> NDArray[Scalar]:
    """Return rows of a q or k projection (or its bias) back in rotate-half order, [heads * head_dim, ...].

    llama.cpp pairs neighbouring dimensions in its rotary embedding, so its converter interleaves the two halves of
    every head; this is the inverse of `LlamaModel.permute` there.
    """
    halves = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def _check_complete(file: GGUFFile, config: Mapping[str, Any]) -> None:
    names = {hf_name(name) for name in file.tensors}
    needed = {"model.embed_tokens.weight", "model.norm.weight"}
    parts = [part for part in _BLOCK.values() if not part.endswith(("q_norm", "k_norm"))]
    needed |= {f"model.layers.{i}.{part}.weight" for i in range(config["num_hidden_layers"]) for part in parts}
    if missing := sorted(needed - names):
        raise ModelError(
            f"{file.path} lacks {len(missing)} tensors that its metadata promises, {missing[0]} among them"
        )
