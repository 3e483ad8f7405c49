"""The weights of a model of transformers, to be replaced."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch

from pegboard.core.interfaces.weights import TensorSpec, WeightStore
from pegboard.toolkit.model.weight_memory import WeightMemory, check_put

if TYPE_CHECKING:
    from pegboard.plugins.model_transformers.replaced import Replaced


class TransformersStore(WeightStore):
    """Writes into the parameters and the buffers that a model saves. `stored` are the names of its checkpoint's
    tensors: one that is not among the model's is not needed. Parameters may be views of those of products, some of them
    packed: all of these are unpacked while an update runs.

    It is made before weights are packed.
    """

    def __init__(self, model: torch.nn.Module, stored: Collection[str], replaced: Replaced) -> None:
        self._replaced = replaced
        self._tensors, self._others = named(model, stored)
        self._specs = {name: TensorSpec(tuple(one.shape), one.dtype) for name, one in self._tensors.items()}
        names = {id(tensor): name for name, tensor in self._tensors.items()}
        weights = {group: [linear.weight for linear in group.linears] for group in replaced.groups}
        self._names = {group: {names[id(one)] for one in some if id(one) in names} for group, some in weights.items()}
        self._memory = WeightMemory()
        self._missing: set[str] = set()
        self._whole = False
        """Whether the next update must be one of all tensors, since memory was given back."""

    def expected(self) -> Mapping[str, TensorSpec]:
        return self._specs

    def ignores(self, name: str) -> bool:
        return name in self._others

    @torch.inference_mode()
    def begin(self, names: Collection[str]) -> None:
        if self._memory.released:
            self._memory.resume()
            self._whole = True
        self._missing = set(self._tensors) if self._whole else set(names)
        for group, parts in self._names.items():
            if group.product.packed and parts & self._missing:
                group.unpack(read=not parts <= self._missing)

    @torch.inference_mode()
    def put(self, name: str, tensor: torch.Tensor) -> None:
        check_put(name, tensor, self._specs[name].shape)
        self._tensors[name].copy_(tensor)
        self._missing.discard(name)

    @torch.inference_mode()
    def finish(self) -> None:
        if self._missing:
            raise ValueError(f"{len(self._missing)} tensors did not come: {min(self._missing)}")
        self._whole = False
        self._replaced.pack()

    @torch.inference_mode()
    def read(self, name: str, most: int) -> torch.Tensor:
        packed = next((group for group, parts in self._names.items() if name in parts and group.product.packed), None)
        if packed is not None:
            packed.unpack()
        found = self._tensors[name].reshape(-1)[:most].cpu().clone()
        if packed is not None:
            packed.pack()
        return found

    @torch.inference_mode()
    def release(self) -> int:
        for group in self._names:
            if group.product.packed:
                group.unpack(read=False)
        products = (tensor for group in self._names for tensor in group.tensors)
        return self._memory.release([*self._tensors.values(), *products])


def named(model: torch.nn.Module, stored: Collection[str]) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
    """Return the tensors that a model saves, once where several names mean the same memory, by the name that the
    checkpoint has; and the other names that it may have.
    """
    by_memory: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        by_memory.setdefault((tensor.data_ptr(), tuple(tensor.shape)), []).append(name)
    chosen = {next((one for one in names if one in stored), names[0]) for names in by_memory.values()}
    others = (frozenset(state) | frozenset(stored)) - chosen
    return {name: tensor for name, tensor in state.items() if name in chosen}, others
