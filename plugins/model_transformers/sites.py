"""The linear layers of a model of transformers as sites: what a batch adds to their products is added by hooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from pegboard.plugins.model_transformers import bridge
from pegboard.plugins.model_transformers.latent import absorbed_products
from pegboard.toolkit.model.linear import SITES, Part, Site, tell_sites

if TYPE_CHECKING:
    from torch import nn


def find_sites(
    model: nn.Module, body: nn.Module, services: Mapping[str, object], in_segments: Iterable[str] = ()
) -> None:
    """Have the linear layers of `body` honour `ForwardBatch.additions`, but experts and the modules named by
    `in_segments`, which compute some of the tokens, and those that are absorbed, which are not called.
    Without a wish for sites among `services` the model stays as it is.
    """
    if SITES not in services:
        return
    whole = set(body.modules()) - set(absorbed_products(model))
    for name in in_segments:
        whole -= set(model.get_submodule(name).modules())
    sites: list[Site] = []
    for name, module in model.named_modules():
        sizes = _sizes(module)
        if sizes is not None and module in whole and "expert" not in name:
            site = Site(len(sites), (Part(name, sizes[1]),), sizes[0])
            module.register_forward_hook(_Adding(site))
            sites.append(site)
    tell_sites(services, sites)


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Return input and output size of a linear layer; None for anything else."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, torch.nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, Conv1D):
        return int(module.weight.shape[0]), int(module.weight.shape[1])
    return None


class _Adding:
    """The hook of one linear layer."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def __call__(self, module: nn.Module, arguments: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        batch = bridge.batch_of_pass()
        if batch is None or batch.additions is None:
            return
        x = arguments[0]
        rows = out.view(-1, out.shape[-1])
        if rows.shape[0] != batch.num_tokens:
            name = self._site.parts[0].name
            raise RuntimeError(f"{name} is called with {rows.shape[0]} rows, not with the batch's {batch.num_tokens}")
        batch.additions.add(self._site.number, x.reshape(-1, x.shape[-1]), rows)
