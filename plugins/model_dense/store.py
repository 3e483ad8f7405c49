"""The weights of a dense decoder, to be replaced."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch

from pegboard.core.interfaces.weights import TensorSpec, WeightStore
from pegboard.toolkit.model.layers import Embedding, FusedLinear
from pegboard.toolkit.model.weight_memory import WeightMemory, check_put, fill, lent
from pegboard.toolkit.system.memory import trim

if TYPE_CHECKING:
    from pegboard.plugins.model_dense.network import DenseNetwork
    from pegboard.toolkit.model.decoder_names import DecoderNames
    from pegboard.toolkit.model.weights import Target

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_TRIM_BYTES = 64 * 2**20
"""After so many bytes that packing has freed, the system gets them back: glibc's malloc does not find them for the next
matrix, which is aligned, so that an update would take a fourth of the matrices beside the weights."""


class DenseStore(WeightStore):
    """Writes into the network's buffers. A matrix that is kept packed is unpacked at the first of its parts, and packed
    again after the last one, or at the end of the update.

    It is made before the network is packed; `packs` says whether that follows.
    """

    def __init__(self, network: DenseNetwork, names: DecoderNames, *, packs: bool) -> None:
        self._network = network
        self._names = names
        targets = names.targets(network.targets())
        self._specs = {name: TensorSpec(tuple(one.shape), _dtype(one)) for name, one in targets.items()}
        self._packed_parts: dict[FusedLinear | Embedding, frozenset[str]] = self._packing() if packs else {}
        self._module_of = {name: module for module, parts in self._packed_parts.items() for name in parts}
        self._packs_embedding = packs and network.spec.tied_embeddings
        self._memory = WeightMemory()
        self._targets: dict[str, Target] = {}
        self._open: dict[FusedLinear | Embedding, set[str]] = {}
        self._missing: set[str] = set()
        self._freed = 0
        """Bytes that packing has freed and that the system has not got back."""
        self._whole = False
        """Whether the next update must be one of all tensors, since memory was given back."""

    @property
    def _head(self) -> Embedding:
        assert self._network.head is not None, "sections lend no weights"
        return self._network.head

    def _packing(self) -> dict[FusedLinear | Embedding, frozenset[str]]:
        """Return what `DenseNetwork.pack` packs and does not keep beside that, with the names of its parts."""
        found: dict[FusedLinear | Embedding, frozenset[str]] = {
            module: frozenset(self._names.stored(f"{part}.weight") for part in module.parts)
            for module in self._network.modules()
            if isinstance(module, FusedLinear)
        }
        if not self._network.spec.tied_embeddings:
            found[self._head] = frozenset([self._names.stored(_HEAD)])
        return found

    def expected(self) -> Mapping[str, TensorSpec]:
        return self._specs

    def ignores(self, name: str) -> bool:
        return self._names.ignores(name)

    @torch.inference_mode()
    def begin(self, names: Collection[str]) -> None:
        if self._memory.released:
            self._memory.resume()
            self._whole = True
        self._missing = set(self._specs) if self._whole else set(names)
        self._open = {module: set(parts) for module, parts in self._packed_parts.items() if not module.packed}
        self._targets = self._names.targets(self._network.targets())

    @torch.inference_mode()
    def memory_of(self, name: str) -> torch.Tensor | None:
        return lent(self._target(name))

    @torch.inference_mode()
    def put(self, name: str, tensor: torch.Tensor) -> None:
        check_put(name, tensor, self._specs[name].shape)
        fill(self._target(name), tensor)
        module = self._module_of.get(name)
        self._missing.discard(name)
        if module is not None:
            self._open[module].discard(name)
            if not self._open[module]:
                self._close(module)

    def _target(self, name: str) -> torch.Tensor:
        """Return where a tensor goes, in a matrix that is not packed (any more)."""
        if self._packs_embedding and self._head.packed and name == self._names.stored(_EMBEDDING):
            self._head.unpack()  # its packed copy would be there twice, once for each state of the weights
        module = self._module_of.get(name)
        if module is not None and module not in self._open:
            if module.packed:
                module.unpack(read=not self._packed_parts[module] <= self._missing)
            self._open[module] = set(self._packed_parts[module])
            self._targets |= self._targets_of(module)
        target = self._targets[name]
        assert isinstance(target, torch.Tensor), "ranks lend no weights"
        return target

    def _targets_of(self, module: FusedLinear | Embedding) -> dict[str, Target]:
        if isinstance(module, Embedding):
            return self._names.targets({_HEAD: module.target()})
        return self._names.targets(module.targets(module.parts))

    def _close(self, module: FusedLinear | Embedding) -> None:
        """Pack a matrix again."""
        del self._open[module]
        for name in self._packed_parts[module]:
            self._targets.pop(name, None)
        self._freed += module.weight.nbytes
        if isinstance(module, Embedding):
            module.pack(looked_up=False)
        else:
            module.pack()
        if self._freed >= _TRIM_BYTES:
            self._trim()

    def _trim(self) -> None:
        self._freed = 0
        trim()

    @torch.inference_mode()
    def finish(self) -> None:
        if self._missing:
            raise ValueError(f"{len(self._missing)} tensors did not come: {min(self._missing)}")
        self._whole = False
        for module in list(self._open):
            self._close(module)
        self._targets = {}
        if self._freed:
            self._trim()
        if self._packs_embedding and not self._head.packed:
            self._head.pack(looked_up=True)

    @torch.inference_mode()
    def read(self, name: str, most: int) -> torch.Tensor:
        module = self._module_of.get(name)
        packed = module is not None and module.packed
        if module is None or not packed:
            target = self._names.targets(self._network.targets())[name]
        else:
            module.unpack()
            target = self._targets_of(module)[name]
        assert isinstance(target, torch.Tensor), "ranks lend no weights"
        found = target.reshape(-1)[:most].cpu().clone()
        if module is not None and packed:
            self._open[module] = set()
            self._close(module)
        return found

    @torch.inference_mode()
    def release(self) -> int:
        before = sum(spec.dtype.itemsize * torch.Size(spec.shape).numel() for spec in self._specs.values())
        for module in self._packed_parts:
            if module.packed:
                module.unpack(read=False)
        if self._packs_embedding and self._head.packed:
            self._head.unpack()
        self._targets = {}
        self._memory.release(self._network.parameters())
        return before


def _dtype(target: Target) -> torch.dtype:
    return target.dtype if isinstance(target, torch.Tensor) else target.into.dtype
