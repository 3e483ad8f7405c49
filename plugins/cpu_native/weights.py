"""A decoder's weights as the library takes them: read a matrix at a time, as numbers or as codes."""

from __future__ import annotations

import ctypes
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pegboard.plugins.cpu_native.codes import NativeCodes, native_codes
from pegboard.plugins.cpu_native.library import FORMATS, Vectors, Weights
from pegboard.toolkit.model.decoder_names import DecoderNames, Experts
from pegboard.toolkit.model.weights import WeightsReader

if TYPE_CHECKING:
    from pegboard.plugins.cpu_native.share import Share
    from pegboard.toolkit.model.coded import CodedMatrix, QuantizedWeights
    from pegboard.toolkit.model.decoder_spec import DecoderSpec
    from pegboard.toolkit.model.moe_spec import MoeSpec

KEEP_CODES = ("bf16", "int8")
"""Values of options.weights with which codes stay codes."""

NO_EXPERT = -1
"""In place of an expert's number, for matrices that are not an expert's."""

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Modules of a layer by their site."""

EXPERT_SITES = ("gate_up", "down")
"""Sites that experts have in place of the layer."""

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Site:
    """The parts of a matrix, for the library. `kept` are the tensors that they point to, `nbytes` their bytes in the
    checkpoint.
    """

    pointers: ctypes.Array[Weights]
    kept: Sequence[Tensor]
    nbytes: int


@dataclass(frozen=True, slots=True)
class LayerVectors:
    """Norms and biases of a layer, likewise."""

    pointers: Vectors
    kept: Sequence[Tensor]
    nbytes: int


class WeightsSource:
    """Where a model's weights come from: those of this rank's `share`. With `codes` quantised matrices stay codes where
    the library has a format for them. Raises ModelError for a checkpoint that does not fit the spec.
    """

    def __init__(
        self, spec: DecoderSpec, directory: Path, coded: QuantizedWeights | None, share: Share, *, codes: bool
    ) -> None:
        self._share = share
        self._names = DecoderNames.of(spec, directory)
        self._spec = spec
        self._together = self._names.experts is not Experts.SINGLE
        self._shapes = shapes(spec, together=self._together)
        self._whole: tuple[str, Tensor] | None = None
        with torch.device("meta"):
            targets = {name: torch.empty(shape) for name, shape in self._shapes.items()}
        self._reader = WeightsReader(directory, self._names.targets(targets), ignore=self._names.ignores, coded=coded)
        self._matrices: Mapping[str, CodedMatrix] = coded.matrices if codes and coded is not None else {}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in their files."""
        return self._reader.nbytes

    def experts(self, index: int, site: str) -> Sequence[int]:
        """Return the experts of which a layer's matrix is; only NO_EXPERT where it is not of experts."""
        moe = self._spec.moe
        mixed = moe is not None and moe.layers[index] and site in EXPERT_SITES
        return range(moe.num_experts) if moe is not None and mixed else (NO_EXPERT,)

    def layer_site(self, index: int, site: str, expert: int = NO_EXPERT) -> Site:
        """Return a matrix of a layer, or of one of its experts."""
        base, parts = f"model.layers.{index}", PARTS[site]
        if expert == NO_EXPERT:
            return self._site([f"{base}.{part}.weight" for part in parts])
        modules = [part.removeprefix("mlp.") for part in parts]
        if self._together:
            return self._part_of_whole(f"{base}.mlp.experts.{site}_proj", expert, len(parts))
        return self._site([f"{base}.mlp.experts.{expert}.{module}.weight" for module in modules])

    def _part_of_whole(self, name: str, expert: int, parts: int) -> Site:
        """Return an expert's part of a tensor [experts, rows, columns] of all experts, which is kept until another is
        wanted.
        """
        stored = 0
        if self._whole is None or self._whole[0] != name:
            self._whole = None
            whole = torch.empty(self._shapes[name], dtype=torch.bfloat16)
            for place, target in self._names.targets({name: whole}).items():
                assert isinstance(target, Tensor)
                self._reader.read(place, target)
                stored += self._reader.stored(place)
            self._whole = name, whole
        return of_numbers(list(self._whole[1][expert].chunk(parts)), stored)

    def head(self, embedding: Tensor) -> Site:
        """Return the head. `embedding` is what `embedding` returned, which it may be."""
        if not self._spec.tied_embeddings:
            return self._site([HEAD])
        coded = self._coded([EMBEDDING])
        return _of_codes(coded, 0) if coded else of_numbers([embedding], 0)

    def embedding(self) -> Tensor:
        """Return the token embeddings bf16 [vocab, hidden], those of the share."""
        return self._read(EMBEDDING, torch.bfloat16)

    def final_norm(self) -> Tensor:
        """Return the last norm's weight float32 [hidden]."""
        return self._read(NORM, torch.float32)

    def vectors(self, index: int) -> LayerVectors:
        """Return what a layer has besides its matrices, in float32."""
        names = {field: name for field, name in vector_names(index, self._shapes).items() if self._share.has(name)}
        read = {field: self._read(name, torch.float32) for field, name in names.items()}
        return layer_vectors(self._spec, index, read, sum(map(self._stored, names.values())))

    def _site(self, names: Sequence[str]) -> Site:
        nbytes = sum(map(self._stored, names))
        if coded := self._coded(names):
            return _of_codes(coded, nbytes)
        return of_numbers([self._read(name, torch.bfloat16) for name in names], nbytes)

    def _coded(self, names: Sequence[str]) -> list[NativeCodes]:
        """Return the parts of a matrix as codes; none where one is not of the format of the others."""
        found: list[NativeCodes] = []
        for name in names:
            matrix = self._matrices.get(self._names.stored(name))
            made = None if matrix is None else native_codes(matrix.layout, matrix.read(_CPU))
            if made is None or (found and made.format != found[0].format):
                return []
            found.append(made)
        return found

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        memory, target = self._share.memory(name, self._shapes[name], dtype)
        self._reader.read(self._names.stored(name), target)
        return memory

    def _stored(self, name: str) -> int:
        return self._reader.stored(self._names.stored(name))


def _of_codes(parts: Sequence[NativeCodes], nbytes: int) -> Site:
    pointers = [
        Weights(one.codes.data_ptr(), one.words.data_ptr(), one.group, FORMATS.index(one.format)) for one in parts
    ]
    return Site((Weights * len(parts))(*pointers), [part for one in parts for part in (one.codes, one.words)], nbytes)


def of_numbers(parts: Sequence[Tensor], nbytes: int) -> Site:
    return Site((Weights * len(parts))(*[Weights(numbers=one.data_ptr()) for one in parts]), parts, nbytes)


def vector_names(index: int, known: Container[str]) -> dict[str, str]:
    """Return the names of what a layer has besides its matrices, by the fields of `Vectors`."""
    base = f"model.layers.{index}"
    fields = {"norm1": f"{base}.input_layernorm.weight", "norm2": f"{base}.post_attention_layernorm.weight"}
    fields |= {f"{one}_norm": f"{base}.self_attn.{one}_norm.weight" for one in "qk"}
    fields |= {f"{one}_bias": f"{base}.self_attn.{one}_proj.bias" for one in "qkvo"}
    fields |= {f"{one}_bias": f"{base}.mlp.{one}_proj.bias" for one in ("gate", "up", "down")}
    fields["router"] = f"{base}.mlp.gate.weight"
    return {field: name for field, name in fields.items() if name in known}


def layer_vectors(spec: DecoderSpec, index: int, fields: Mapping[str, Tensor], nbytes: int = 0) -> LayerVectors:
    """Return what a layer has besides its matrices, of tensors float32 by the fields of `Vectors`."""
    pointers = Vectors(**{field: one.data_ptr() for field, one in fields.items()}, window=spec.windows[index] or 0)
    return LayerVectors(pointers, [*fields.values()], nbytes)


def shapes(spec: DecoderSpec, *, together: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight that a checkpoint has, under transformers' names. It has the experts of a layer
    `together`, or one by one.
    """
    hidden = spec.hidden_size
    found: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, hidden), NORM: (hidden,)}
    if not spec.tied_embeddings:
        found[HEAD] = (spec.vocab_size, hidden)
    for index in range(spec.num_layers):
        name = f"model.layers.{index}"
        sizes = {
            "self_attn.q_proj": (spec.q_size, hidden, spec.qkv_bias),
            "self_attn.k_proj": (spec.kv_size, hidden, spec.qkv_bias),
            "self_attn.v_proj": (spec.kv_size, hidden, spec.qkv_bias),
            "self_attn.o_proj": (hidden, spec.q_size, spec.o_bias),
            **_mlp_sizes(spec, index, together),
        }
        if spec.moe is not None and spec.moe.layers[index]:
            found |= _together_shapes(spec.moe, hidden, name) if together else {}
            found[f"{name}.mlp.gate.weight"] = (spec.moe.num_experts, hidden)
        for part, (rows, columns, bias) in sizes.items():
            found[f"{name}.{part}.weight"] = (rows, columns)
            if bias:
                found[f"{name}.{part}.bias"] = (rows,)
        for part in ("input_layernorm", "post_attention_layernorm"):
            found[f"{name}.{part}.weight"] = (hidden,)
        if spec.qk_norm:
            for part in ("self_attn.q_norm", "self_attn.k_norm"):
                found[f"{name}.{part}.weight"] = (spec.head_dim,)
    return found


def _mlp_sizes(spec: DecoderSpec, index: int, together: bool) -> dict[str, tuple[int, int, bool]]:
    """Return rows, columns and whether there is a bias of a layer's linear layers besides attention, by name."""
    hidden, moe = spec.hidden_size, spec.moe
    if moe is None or not moe.layers[index]:
        return _gated("mlp", hidden, spec.intermediate_size, spec.mlp_bias)
    if together:
        return {}
    found: dict[str, tuple[int, int, bool]] = {}
    for expert in range(moe.num_experts):
        found |= _gated(f"mlp.experts.{expert}", hidden, moe.intermediate_size, False)
    return found


def _gated(name: str, hidden: int, inter: int, bias: bool) -> dict[str, tuple[int, int, bool]]:
    up = inter, hidden, bias
    return {f"{name}.gate_proj": up, f"{name}.up_proj": up, f"{name}.down_proj": (hidden, inter, bias)}


def _together_shapes(moe: MoeSpec, hidden: int, name: str) -> dict[str, tuple[int, ...]]:
    experts, inter = moe.num_experts, moe.intermediate_size
    return {
        f"{name}.mlp.experts.gate_up_proj": (experts, 2 * inter, hidden),
        f"{name}.mlp.experts.down_proj": (experts, hidden, inter),
    }
