"""Libraries that are called wrongly: what the backend says is changed on its way to the imitation."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.plugins.attn_flashinfer.fake_flashinfer import FakeFlashInfer
from tests.plugins.attn_flashinfer.fake_flashinfer_device import DeviceFence

LISTS = {"Decode": (0, 1, 2), "Prefill": (1, 2, 3)}
"""Where `plan` has indptr, indices and the lengths of last pages."""

Named = dict[str, Any]


class Between:
    """A wrapper behind one that changes what comes by."""

    def __init__(self, library: Spoilt, kind: str, *args: Any, **kwargs: Any) -> None:
        library.make(kwargs)
        self._library, self._kind = library, kind
        self._inner = getattr(library.imitation, f"Batch{kind}WithPagedKVCacheWrapper")(*args, **kwargs)
        self._plans = 0

    def plan(self, *args: Any, **kwargs: Any) -> None:
        lists = [args[at] for at in LISTS[self._kind]]
        changed = dict(zip(LISTS[self._kind], self._library.lists(*lists), strict=True))
        self._library.plan(kwargs)
        self._plans += 1
        if self._plans == 1 or self._library.plans_again:
            self._inner.plan(*(changed.get(at, value) for at, value in enumerate(args)), **kwargs)

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], **kwargs: Any) -> object:
        self._library.run(kwargs)
        found = self._inner.run(q, cache, **kwargs)
        return (found[0], self._library.lse(found[1])) if isinstance(found, tuple) else found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Spoilt(FakeFlashInfer):
    """Lets a subclass change what `plan` and `run` are given, what `run` answers, and how wrappers are made."""

    plans_again = True

    def __init__(self, *, lax: bool = False) -> None:
        super().__init__(lax=lax)
        self.imitation = FakeFlashInfer(lax=lax)
        self.device = self.imitation.device
        for kind in LISTS:
            setattr(self, f"Batch{kind}WithPagedKVCacheWrapper", self._maker(kind))

    def _maker(self, kind: str) -> Any:
        return lambda *args, **kwargs: Between(self, kind, *args, **kwargs)

    def make(self, arguments: Named) -> None:
        pass

    def plan(self, arguments: Named) -> None:
        pass

    def lists(
        self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return indptr, indices, last

    def run(self, arguments: Named) -> None:
        pass

    def lse(self, lse: torch.Tensor) -> torch.Tensor:
        return lse


class WindowTooWide(Spoilt):
    def plan(self, arguments: Named) -> None:
        arguments["window_left"] += arguments["window_left"] >= 0


class WindowTooNarrow(Spoilt):
    """FlashInfer counts the keys before a token's own, and 0 of them is a window, too."""

    def plan(self, arguments: Named) -> None:
        arguments["window_left"] -= arguments["window_left"] >= 0


class WindowOverTheMask(Spoilt):
    """Counts slots in draft trees."""

    def plan(self, arguments: Named) -> None:
        if arguments.get("packed_custom_mask") is not None:
            arguments["window_left"] = 2


class LastPageIsEmpty(Spoilt):
    """The remainder, which is 0 where a page is full."""

    def lists(self, indptr: Any, indices: Any, last: Any) -> Any:
        return indptr, indices, torch.where(last == last.max(), 0, last)


class IndptrOnTheDevice(Spoilt):
    def lists(self, indptr: Any, indices: Any, last: Any) -> Any:
        return indptr.as_subclass(torch.Tensor), indices, last


class IndicesOnTheHost(Spoilt):
    def lists(self, indptr: Any, indices: Any, last: Any) -> Any:
        return indptr, self.host(indices.numpy()), last


class IndptrOf64Bits(Spoilt):
    def lists(self, indptr: Any, indices: Any, last: Any) -> Any:
        return indptr.long(), indices, last


class PlansOnce(Spoilt):
    """Leaves wrappers with the plan of an earlier batch."""

    plans_again = False


class DefaultScale(Spoilt):
    def plan(self, arguments: Named) -> None:
        arguments["sm_scale"] = None


class NoCap(Spoilt):
    def plan(self, arguments: Named) -> None:
        arguments["logits_soft_cap"] = None


class NotCausal(Spoilt):
    def plan(self, arguments: Named) -> None:
        if "causal" in arguments:
            arguments["causal"] = False


class HighBitFirst(Spoilt):
    def plan(self, arguments: Named) -> None:
        mask = arguments.get("packed_custom_mask")
        if mask is not None:
            order = torch.arange(7, -1, -1)
            bits = (mask[:, None] >> order) & 1
            arguments["packed_custom_mask"] = (bits << torch.arange(8)).sum(1).to(torch.uint8)


class MaskedInTheGraphsBackend(Spoilt):
    """fa3 knows no masks."""

    def make(self, arguments: Named) -> None:
        arguments["backend"] = "fa3"


class NaturalLogSumExp(Spoilt):
    """The base is 2 in truth, so a backend that takes it for e is off by as much as one that is given e."""

    def lse(self, lse: torch.Tensor) -> torch.Tensor:
        return lse * math.log(2.0)


class NoKeyScale(Spoilt):
    def run(self, arguments: Named) -> None:
        arguments["k_scale"] = None


class NoValueScale(Spoilt):
    def run(self, arguments: Named) -> None:
        arguments["v_scale"] = None


class NewBuffersAtReplay(Spoilt):
    """Wrappers of graphs without buffers of their own."""

    def make(self, arguments: Named) -> None:
        arguments["use_cuda_graph"] = False


class NoFence(Spoilt):
    """Plans while an earlier plan may still be in pinned memory, uncopied."""

    def fence(self) -> DeviceFence:
        return DeviceFence(())
