"""A GGUF file's metadata, and the config.json that follows from it.

Key names are those of the GGUF specification; what they mean for a network is read from llama.cpp's converter.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
from numpy.typing import NDArray

from pegboard.core.interfaces.errors import ModelError
from pegboard.plugins.model_sources.gguf.parts import check_part, part_files
from pegboard.toolkit.model.model_config import check_model_config

T = TypeVar("T")

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
"""GGUF architecture -> transformers class and model type. Mistral's files say "llama" too."""


class _Reader(gguf.GGUFReader):
    """The library's reader on a plain view of its memory map. It slices that once for every string of a vocabulary, and
    a slice of `np.memmap` costs five times what one of an array costs: a second or more of a first start.

    Nothing is read beyond the file's end, where the library would go on with nothing for as long as a count says.
    """

    @property  # type: ignore[override]
    def data(self) -> NDArray[Any]:
        """All bytes of the file."""
        return self._bytes

    @data.setter
    def data(self, value: NDArray[Any]) -> None:
        self._bytes = value.view(np.ndarray)

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> NDArray[Any]:
        if int(offset) + int(count) * np.dtype(dtype).itemsize > self._bytes.size:
            raise ValueError(f"it ends at byte {self._bytes.size}, before what its header promises")
        return super()._get(offset, dtype, count, override_order)


class GGUFFile:
    """An open GGUF file: typed look-ups of metadata, and the table of tensors. Data is memory-mapped.

    Raises ModelError where the file is not GGUF.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._reader = _Reader(self.path)
        except RecursionError:
            raise ModelError(f"{self.path} is not a readable GGUF file: its metadata are nested too deeply") from None
        except (ValueError, LookupError, ArithmeticError, OSError) as error:
            raise ModelError(f"{self.path} is not a readable GGUF file: {error}; fetch it again") from error
        self.tensors: dict[str, gguf.ReaderTensor] = {tensor.name: tensor for tensor in self._reader.tensors}

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Return the file, with the tensors of all parts where it is one of several. Raises ModelError for a part that
        is missing or another model's, and for an architecture that is not supported.
        """
        parts = [cls(part) for part in part_files(path)]
        for index, part in enumerate(parts):
            check_part(part.path, part.get("split.no"), part.get("split.count"), index, len(parts))
        first = parts[0]
        for part in parts[1:]:
            if twice := sorted(first.tensors.keys() & part.tensors.keys()):
                raise ModelError(f"{part.path} has the tensor {twice[0]}, which an earlier part has, too")
            first.tensors.update(part.tensors)
        if first.architecture not in ARCHITECTURES:
            raise ModelError(
                f"{first.path}: GGUF architecture {first.architecture!r} is not supported; supported: "
                f"{', '.join(ARCHITECTURES)}. Use the model's safetensors checkpoint instead"
            )
        return first

    @functools.cached_property
    def architecture(self) -> str:
        """The architecture, which only the first part of several names."""
        return self.need("general.architecture", str)

    def get(self, key: str) -> Any:
        """Return the value of a key, arrays as lists; None where the file does not have it."""
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def need(self, key: str, kind: type[T]) -> T:
        """Return the value of a key that must be there and of this type. An int is taken for a float."""
        value = self.get(key)
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind):
            raise ModelError(f"{self.path}: metadata key {key} should hold a {kind.__name__}, found {value!r:.80}")
        return value

    def arch(self, key: str) -> Any:
        """Return the value of ``<architecture>.<key>``, or None."""
        return self.get(f"{self.architecture}.{key}")

    def need_int(self, key: str) -> int:
        """``<architecture>.<key>`` as an int. A list (per-layer values) must hold one and the same value."""
        value = self.arch(key)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if isinstance(value, list):
            raise ModelError(f"{self.path}: {self.architecture}.{key} differs between layers, which is not supported")
        if not isinstance(value, int) or value <= 0:
            stated = "is missing" if value is None else f"must be a positive integer, found {value!r:.80}"
            raise ModelError(f"{self.path}: metadata key {self.architecture}.{key} {stated}")
        return value

    def dequantized(self, name: str) -> NDArray[np.float32]:
        """Return a tensor as float32 in row-major [out, in] order; a new array. Raises ModelError for an unknown
        format.
        """
        tensor = self.tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {name} is stored as {tensor.tensor_type.name}, which cannot be dequantised"
            ) from error
        shape = tuple(int(n) for n in reversed(tensor.shape.tolist()))
        return np.ascontiguousarray(values, dtype=np.float32).reshape(shape)


def model_config(file: GGUFFile) -> dict[str, object]:
    """config.json of the network that the file describes. Raises ModelError for parts that are not supported."""
    if file.arch("expert_count"):
        raise ModelError(f"{file.path}: mixtures of experts are not supported as GGUF; use the safetensors checkpoint")
    class_name, model_type = ARCHITECTURES[file.architecture]
    heads = file.need_int("attention.head_count")
    hidden = file.need_int("embedding_length")
    head_dim = file.need_int("attention.key_length") if file.arch("attention.key_length") else hidden // heads
    rotary = file.arch("rope.dimension_count")
    if rotary not in (None, head_dim):
        raise ModelError(f"{file.path}: partial rotary embeddings ({rotary} of {head_dim} dims) are not supported")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} lacks the tensor token_embd.weight, so it is not a language model")
    theta = _shortest(float(file.arch("rope.freq_base") or 10000.0))
    config: dict[str, object] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": int(file.tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": file.need_int("feed_forward_length"),
        "num_hidden_layers": file.need_int("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.need_int("attention.head_count_kv")
        if file.arch("attention.head_count_kv")
        else heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.need_int("context_length"),
        "rms_norm_eps": _shortest(file.need(f"{file.architecture}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": theta,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": _precision(file),
    }
    if "blk.0.attn_q.bias" in file.tensors and model_type != "qwen2":
        config["attention_bias"] = True
    if scaling := _rope_scaling(file, head_dim, theta):
        config["rope_scaling"] = scaling
    config |= _special_token_ids(file)
    check_model_config(config, str(file.path))
    return config


def _special_token_ids(file: GGUFFile) -> dict[str, int]:
    """Return the ids that the file names, by their keys in a config.json."""
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
    found = {ours: file.get(f"tokenizer.ggml.{name}_token_id") for name, ours in names.items()}
    return {name: int(token_id) for name, token_id in found.items() if token_id is not None}


def _precision(file: GGUFFile) -> str:
    """Return what the model was published in, not what its weights are stored as here, which is float32: bfloat16 for
    quantised ones, whose weights have far fewer digits than that.
    """
    # Norms and biases are float32 in every file.
    kinds = {tensor.tensor_type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F16", "F32"} else "bfloat16"


def _shortest(value: float) -> float:
    """Return a float32 number as the shortest decimal that means it: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(file: GGUFFile, head_dim: int, theta: float) -> dict[str, object] | None:
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, head_dim, theta)
    kind = file.arch("rope.scaling.type")
    if kind in (None, "none"):
        return None
    factor = file.need(f"{file.architecture}.rope.scaling.factor", float)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": file.need_int("rope.scaling.original_context_length"),
        }
    raise ModelError(f"{file.path}: rope scaling {kind!r} is not supported")


def _llama3_scaling(file: GGUFFile, head_dim: int, theta: float) -> dict[str, object]:
    """Llama 3.1's rope parameters, recovered from the frequency factors that the file carries instead of them."""
    factors = file.dequantized("rope_freqs.weight").astype(np.float64).ravel()
    factor = _shortest(float(factors.max()))
    scaling: dict[str, object] = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((8192 / wavelengths - 1.0) / 3.0, 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise ModelError(
            f"{file.path}: the rope frequency factors are not those of Llama 3.1, so they are not supported"
        )
    return scaling
