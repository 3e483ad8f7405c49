"""The linear layers of a model of transformers as sites: what a batch adds to their products is added by hooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from pegboard.plugins.model_transformers import bridge
from pegboard.plugins.model_transformers.latent import absorbed_products
from pegboard.plugins.model_transformers.merged import is_linear
from pegboard.toolkit.model.linear import SITES, Part, Site, tell_sites

if TYPE_CHECKING:
    from torch import nn

    from pegboard.plugins.model_transformers.merged import LinearGroup


def find_sites(
    model: nn.Module,
    body: nn.Module,
    services: Mapping[str, object],
    in_segments: Iterable[str] = (),
    merged: Iterable[LinearGroup] = (),
) -> None:
    """Have the linear layers of `body` honour `ForwardBatch.additions`, but experts and the modules named by
    `in_segments`, which compute some of the tokens, and those that are absorbed, which are not called. Layers that are
    `merged` are one site. Without a wish for sites among `services` the model stays as it is.
    """
    if SITES not in services:
        return
    whole = set(body.modules()) - set(absorbed_products(model))
    for name in in_segments:
        whole -= set(model.get_submodule(name).modules())
    names = {module: name for name, module in model.named_modules() if module in whole and "expert" not in name}
    group_of = {linear: group for group in merged if names.keys() >= set(group.linears) for linear in group.linears}
    sites: list[Site] = []
    for module, name in names.items():
        sizes, group = _sizes(module), group_of.get(module)
        if sizes is None:
            continue
        if group is None:
            site = Site(len(sites), (Part(name, sizes[1]),), sizes[0])
            module.register_forward_hook(_Adding(site))
            sites.append(site)
        elif group.site is None:
            parts = (Part(names[linear], linear.out_features) for linear in group.linears)
            group.site = Site(len(sites), tuple(parts), sizes[0])
            sites.append(group.site)
    tell_sites(services, sites)


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Return input and output size of a linear layer; None for anything else."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, torch.nn.Linear):
        # A router may be a subclass that returns several tensors.
        return (module.in_features, module.out_features) if is_linear(module) else None
    if isinstance(module, Conv1D):
        return int(module.weight.shape[0]), int(module.weight.shape[1])
    return None


class _Adding:
    """The hook of one linear layer."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def __call__(self, module: nn.Module, arguments: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        bridge.add_to(self._site, arguments[0], out)
