"""Layers of a dense decoder: inference only, fused where it saves calls, loaded in place. In torch, and where `kernels`
are usable in those.

Every layer allocates its weights uninitialised and says through `targets()` where a checkpoint's tensors go: views into
its own buffers, so that loading copies each tensor once and nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pegboard.toolkit.kernels import operations
from pegboard.toolkit.model.experts import ExpertLinear
from pegboard.toolkit.model.linear import LinearMethod, Part, Site
from pegboard.toolkit.model.packed import pack, packed_linear
from pegboard.toolkit.model.ranks import Cut, Ranks
from pegboard.toolkit.model.weights import Slice, Target

if TYPE_CHECKING:
    from pegboard.core.interfaces.forward import Additions
    from pegboard.toolkit.model.coded import QuantizedWeights

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the function that a config's `hidden_act` names. Raises KeyError for an unknown one."""
    return _ACTIVATIONS[name]


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Return an uninitialised weight that takes no gradient."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, weight [dim], computed in float32 (Zhang and Sennrich 2019).

    In torch it rounds to the input's dtype before the weight is applied, as transformers does; a kernel rounds once.
    """

    def __init__(self, dim: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(dim, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        if operations.takes(x):
            return operations.rms_norm(x, self.weight, self.eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of residual + x [tokens, dim], and that sum. A kernel adds in place: `residual` is given
        away.
        """
        if operations.takes(x):
            return operations.add_rms_norm(x, residual, self.weight, self.eps), residual
        total = residual + x
        normed: Tensor = self(total)
        return normed, total

    def targets(self, name: str) -> dict[str, Target]:
        """Checkpoint name -> buffer, for a norm called `name`."""
        return {f"{name}.weight": self.weight}


class FusedLinear(nn.Module):
    """Several projections of one input as one matrix product.

    `sizes` are the output sizes of the parts; forward maps [tokens, in] to [tokens, sum(sizes)], parts side by side.
    Where the weight is `coded`, it has no memory, and a LinearMethod takes its place before the first product. Where
    ranks share it, all sizes are those of this rank's share, and `share` says how that is cut.
    """

    def __init__(
        self,
        in_size: int,
        sizes: Sequence[int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        coded: bool = False,
        share: Share | None = None,
    ) -> None:
        super().__init__()
        self.sizes = tuple(sizes)
        self.share = share
        where = torch.device("meta") if coded else device
        self.weight = empty_parameter(sum(sizes), in_size, dtype=dtype, device=where)
        self.bias = empty_parameter(sum(sizes), dtype=dtype, device=device) if bias else None
        self.parts: tuple[str, ...] = ()
        """The names of its parts in the network, if `Linears` made it."""
        self.site: Site | None = None
        """Where it stands in the network; None where nothing is added to its products."""
        self._packed: Tensor | None = None
        self._method: LinearMethod | None = None

    def forward(self, x: Tensor, additions: Additions | None = None) -> Tensor:
        out = self._reduced(x)
        if additions is not None and self.site is not None:
            additions.add(self.site.number, x, out)
        return out

    def _reduced(self, x: Tensor) -> Tensor:
        if self.share is not None and self.share.columns is not None:
            # Partial sums: the bias counts once.
            ranks = self.share.ranks
            return ranks.all_reduce(self._product(x, self.bias if ranks.index == 0 else None))
        return self._product(x, self.bias)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._method is not None:
            return self._method.apply(x, bias)
        if self._packed is not None:
            return packed_linear(x, self._packed, bias)
        return F.linear(x, self.weight, bias)

    def pack(self) -> None:
        """Keep the loaded weight as `packed` does it, and in no other form: there are no `targets` any more. What has a
        method stays with it.
        """
        if self._method is None:
            self._packed = pack(self.weight)
            del self.weight

    @property
    def packed(self) -> bool:
        """Whether its weight is kept as `packed` does it."""
        return self._packed is not None

    @property
    def coded(self) -> bool:
        """Whether a LinearMethod has its weight."""
        return self._method is not None

    def unpack(self, *, read: bool = True) -> None:
        """Undo `pack`, so that the weight can change; without `read` it has no meaning until it is written."""
        assert self._packed is not None
        self.weight = unpacked(self._packed, read=read)
        self._packed = None

    def use(self, method: LinearMethod) -> None:
        """Multiply by a method's weights. There are no `targets` any more."""
        self._method = method
        del self.weight

    def targets(self, names: Sequence[str]) -> dict[str, Target]:
        """Checkpoint name -> buffer, with one name per part. A packed weight has none."""
        share, found = self.share or Share(Ranks()), dict[str, Target]()
        if self._packed is None:
            weights = torch.split(self.weight, list(self.sizes))
            found = {
                f"{name}.weight": share.of_weight(at, part) for at, (name, part) in enumerate(_named(names, weights))
            }
        if self.bias is not None:
            biases = torch.split(self.bias, list(self.sizes))
            found |= {
                f"{name}.bias": share.of_rows(place, part) for place, (name, part) in enumerate(_named(names, biases))
            }
        return found


def _named(names: Sequence[str], parts: Sequence[Tensor]) -> Iterable[tuple[str, Tensor]]:
    return zip(names, parts, strict=True)


@dataclass(frozen=True, slots=True)
class Share:
    """What of a product is this rank's: `rows` of each part, whose outputs it alone computes, or some `columns`, so
    that the ranks' outputs are partial sums.
    """

    ranks: Ranks
    rows: tuple[Cut, ...] = ()
    columns: Cut | None = None

    @property
    def cuts(self) -> list[tuple[int, Cut]]:
        """For each part the dimension of its weight that is cut, and its share."""
        return [(0, cut) for cut in self.rows] if self.columns is None else [(1, self.columns)]

    def of_weight(self, part: int, weight: Tensor) -> Target:
        """Return where the checkpoint's weight of a part goes."""
        if self.columns is None:
            return self.of_rows(part, weight)
        return Slice(weight, 1, self.columns.start, (weight.shape[0], self.columns.full))

    def of_rows(self, part: int, kept: Tensor) -> Target:
        """Return where what the checkpoint has for each row of a part goes."""
        if not self.rows:
            return kept
        return Slice(kept, 0, self.rows[part].start, (self.rows[part].full, *kept.shape[1:]))


class Linears:
    """Makes the linear layers of a network, in `dtype` on `device`, and numbers its sites: those whose weights are
    quantised get their products from `weights`. `stored` gives the checkpoint's name of a tensor of the network. The
    `ranks` share each layer that is split.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        weights: QuantizedWeights | None = None,
        stored: Callable[[str], str] = lambda name: name,
        ranks: Ranks | None = None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.ranks = ranks or Ranks()
        self._weights = weights
        self._stored = stored
        self._made = 0
        self.sites: list[Site] = []
        """All that were made, but experts."""
        self._coded: list[tuple[FusedLinear, Site, list[str]]] = []
        self._coded_experts: list[tuple[ExpertLinear, Site, list[list[str]]]] = []

    def coded(self, parts: Iterable[str]) -> bool:
        """Return whether weights of linear layers of these names are quantised."""
        return self._weights is not None and any(
            self._stored(f"{name}.weight") in self._weights.matrices for name in parts
        )

    def __call__(
        self,
        in_size: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        split: Literal["", "out", "in"] = "",
        unit: int = 1,
    ) -> FusedLinear:
        """Return the layer of the parts of these names, which have so many rows each. Ranks `split` the rows of each
        part ("out"), or the columns ("in"), of which `unit` stay together.
        """
        names, coded = [self._stored(f"{name}.weight") for name in parts], self.coded(parts)
        whole = tuple(Part(name, rows) for name, rows in parts.items())
        site = Site(self._made, whole, in_size)
        sizes, share = tuple(parts.values()), self._share(split, in_size, tuple(parts.values()), unit)
        if share is not None:
            sizes = tuple(cut.length for cut in share.rows) or sizes
            in_size = in_size if share.columns is None else share.columns.length
        made = FusedLinear(in_size, sizes, bias=bias, dtype=self.dtype, device=self.device, coded=coded, share=share)
        made.parts = tuple(parts)
        if coded:
            self._coded.append((made, site, names))
        made.site = site
        self.sites.append(site)
        self._made += 1
        return made

    def experts(self, count: int, in_size: int, parts: Mapping[str, int]) -> ExpertLinear:
        """Return the layer of `count` experts, each of the parts of these names, which have so many rows each. A * in a
        name stands for the expert's number. They are quantised if some of them is.
        """
        named = [[name.replace("*", str(expert)) for name in parts] for expert in range(count)]
        coded, rows = self.coded(name for names in named for name in names), sum(parts.values())
        made = ExpertLinear(count, rows, in_size, dtype=self.dtype, device=self.device, coded=coded)
        if coded:
            site = Site(self._made, tuple(Part(name, size) for name, size in parts.items()), in_size, count)
            stored = [[self._stored(f"{name}.weight") for name in names] for names in named]
            self._coded_experts.append((made, site, stored))
        self._made += 1
        return made

    def _share(self, split: str, in_size: int, sizes: tuple[int, ...], unit: int) -> Share | None:
        if not split or self.ranks.size == 1:
            return None
        if split == "in":
            return Share(self.ranks, columns=self.ranks.cut(in_size, unit))
        return Share(self.ranks, rows=tuple(self.ranks.cut(size, unit) for size in sizes))

    def read(self) -> None:
        """Read the weights that are quantised, site by site, and have products made of them. Raises ModelError."""
        if self._weights is not None:
            for made, site, names in self._coded:
                cuts = made.share.cuts if made.share is not None else ()
                made.use(self._weights.linear(site, names, self.device, cuts))
            for experts, site, stored in self._coded_experts:
                experts.use(self._weights.experts(site, stored, self.device))


class Embedding(nn.Module):
    """Token embeddings [vocab, hidden]; also the output projection of a model with tied embeddings. Ranks share the
    vocabulary.
    """

    def __init__(
        self, vocab: int, hidden: int, *, dtype: torch.dtype, device: torch.device, ranks: Ranks | None = None
    ) -> None:
        super().__init__()
        self._ranks = ranks or Ranks()
        self._vocab = vocab
        self.cut = self._ranks.vocabulary(vocab)
        rows = self._ranks.vocabulary_rows(vocab)
        self.weight = empty_parameter(rows, hidden, dtype=dtype, device=device)
        if self.cut.length < rows:
            self.weight[self.cut.length :] = 0
        self._packed: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        """Return rows of int64 `ids` [tokens]: [tokens, hidden]."""
        if self._ranks.size == 1:
            return F.embedding(ids, self.weight)
        own = ids - self.cut.start
        inside = (own >= 0) & (own < self.cut.length)
        return self._ranks.all_reduce(F.embedding(own * inside, self.weight) * inside.unsqueeze(-1))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits float32 [n, vocab] of hidden states [n, hidden]; a new tensor. Only rank 0 has them: the others
        get numbers without a meaning.
        """
        if self._packed is not None:
            own = packed_linear(hidden, self._packed).float()
        else:
            own = F.linear(hidden, self.weight).float()
        return self._ranks.logits(own, self._vocab)

    def target(self) -> Target:
        """Return where the checkpoint's tensor goes."""
        if self._ranks.size == 1:
            return self.weight
        kept = self.weight[: self.cut.length]
        return Slice(kept, 0, self.cut.start, (self._vocab, kept.shape[1]))

    def pack(self, *, looked_up: bool) -> None:
        """Keep the loaded weight as `packed` does it, for `logits`. Beside it the rows stay where they are `looked_up`;
        else they go, and there are no embeddings and no `targets` any more.
        """
        self._packed = pack(self.weight)
        if not looked_up:
            del self.weight

    @property
    def packed(self) -> bool:
        """Whether it keeps its weight as `packed` does it."""
        return self._packed is not None

    def unpack(self, *, read: bool = True) -> None:
        """Undo `pack`, as FusedLinear does."""
        assert self._packed is not None
        if not hasattr(self, "weight"):
            self.weight = unpacked(self._packed, read=read)
        self._packed = None


def unpacked(packed: Tensor, *, read: bool) -> nn.Parameter:
    """Return a packed weight as a plain one; without `read` only memory for it."""
    if read:
        return nn.Parameter(packed.to_dense(), requires_grad=False)
    return empty_parameter(*packed.shape, dtype=packed.dtype, device=packed.device)
