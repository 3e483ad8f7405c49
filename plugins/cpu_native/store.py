"""The weights in the native library, to be replaced: all of them at once, since it keeps them packed together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch

from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.weights import TensorSpec, WeightStore
from pegboard.plugins.cpu_native.weights import (
    EMBEDDING,
    HEAD,
    NORM,
    PARTS,
    layer_vectors,
    of_numbers,
    shapes,
    vector_names,
)
from pegboard.toolkit.model.weight_memory import check_put, fill

if TYPE_CHECKING:
    from pegboard.plugins.cpu_native.model import NativeModel
    from pegboard.toolkit.model.decoder_names import DecoderNames

_GROUP = "the whole model"


class NativeStore(WeightStore):
    """Packs each matrix once all of its parts have come; what came so far is kept. The old weights go when an update
    begins, so that memory for one set of them is enough.
    """

    def __init__(self, model: NativeModel, names: DecoderNames) -> None:
        self._model = model
        self._names = names
        self._shapes = shapes(model.spec)
        self._own = {names.stored(name): name for name in self._shapes}
        self._sites = {
            f"model.layers.{index}.{part}.weight": (index, site)
            for index in range(model.spec.num_layers)
            for site, parts in PARTS.items()
            for part in parts
        }
        self._arrived: dict[str, torch.Tensor] = {}
        self._lent: dict[str, torch.Tensor] = {}
        self._left: set[str] = set()

    def expected(self) -> Mapping[str, TensorSpec]:
        return {name: TensorSpec(self._shapes[own], torch.bfloat16, _GROUP) for name, own in self._own.items()}

    def ignores(self, name: str) -> bool:
        return self._names.ignores(name)

    def begin(self, names: Collection[str]) -> None:
        self._arrived, self._lent, self._left = {}, {}, set(self._shapes)
        self._model.renew()

    def memory_of(self, name: str) -> torch.Tensor | None:
        own = self._own[name]
        if len(self._shapes[own]) != 2:  # kept in another type
            return None
        self._lent[own] = torch.empty(self._shapes[own], dtype=torch.bfloat16)
        return self._lent[own]

    def put(self, name: str, tensor: torch.Tensor) -> None:
        own = self._own[name]
        check_put(name, tensor, self._shapes[own])
        dtype = torch.bfloat16 if tensor.dim() == 2 else torch.float32
        # What is lent or a copy: embeddings live on for good, the others until the last part of their matrix has come.
        memory = self._lent.pop(own, None)
        if memory is not None:
            fill(memory, tensor.detach())
        else:
            memory = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        self._arrived[own] = memory
        self._left.discard(own)
        if own in self._sites:
            self._pack(*self._sites[own])

    def _pack(self, index: int, site: str) -> None:
        names = [f"model.layers.{index}.{part}.weight" for part in PARTS[site]]
        if all(name in self._arrived for name in names):
            self._model.set_site(index, site, of_numbers([self._arrived.pop(name) for name in names], 0))

    def finish(self) -> None:
        if self._left:
            raise ValueError(f"{len(self._left)} tensors did not come: {self._names.stored(min(self._left))}")
        arrived, self._arrived = self._arrived, {}
        spec = self._model.spec
        for index in range(spec.num_layers):
            fields = {field: arrived[name] for field, name in vector_names(index, arrived).items()}
            self._model.set_vectors(index, layer_vectors(spec, index, fields))
        self._model.set_ends(arrived[EMBEDDING], arrived[NORM])
        self._model.set_site(0, "head", of_numbers([arrived[EMBEDDING if spec.tied_embeddings else HEAD]], 0))

    def read(self, name: str, most: int) -> torch.Tensor:
        if self._own[name] != EMBEDDING:
            raise Unsupported(
                "the runner 'cpu_native'", "updates", f"{name} is packed, and only embeddings can be read"
            )
        return self._model.embedding.reshape(-1)[:most].clone()

    def release(self) -> int:
        freed = sum(stored for _, stored in self._model.weights_by_format().values()) + self._model.embedding.nbytes
        self._model.forget()
        return freed
