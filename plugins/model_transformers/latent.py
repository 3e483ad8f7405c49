"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434): the pool keeps one latent per token, which
attention reads through absorbed projections.

transformers expands each token's latent to keys and values of all heads before it attends (`expand_kv`). Here the
attention modules hand over the latent itself, [latent, rope], and the up-projections of keys and of values
(`kv_b_proj`) are applied to queries and to the output of attention instead. That is the same product in another order.

The absorbed matrices are read from `kv_b_proj.weight`, in the model's type: `layouts.exact` of what a quantised
checkpoint stores. They are not sites of products with codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

EXPAND = "expand_kv"
Expanded = tuple[torch.Tensor, torch.Tensor]


def is_latent(module: torch.nn.Module) -> bool:
    """Return whether an attention module of transformers computes keys and values from a latent."""
    return hasattr(module, EXPAND) and hasattr(module, "kv_b_proj")


def absorbed_products(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the linear layers whose weights are applied elsewhere, so that they are not called."""
    for module in model.modules():
        if is_latent(module):
            yield module.get_submodule("kv_b_proj")


def keep_latents(model: torch.nn.Module, when: Callable[[], bool]) -> None:
    """Make the attention modules of a model that have latents hand these over if `when` is true at the call. Otherwise
    the model computes what it always does.
    """
    for module in model.modules():
        if is_latent(module):
            expand: Callable[..., Expanded] = getattr(module, EXPAND)
            module.__dict__[EXPAND] = _handing_over(expand, when)


def _handing_over(expand: Callable[..., Expanded], when: Callable[[], bool]) -> Callable[..., Expanded]:
    def latent(kv_nope: torch.Tensor, k_rot: torch.Tensor, *further: object, **named: object) -> Expanded:
        """Return [1, 1, tokens, rank + rope] and [1, 1, tokens, rank] in the places of keys and values."""
        if not when():
            return expand(kv_nope, k_rot, *further, **named)
        return torch.cat([kv_nope, k_rot], -1), kv_nope

    return latent


def absorbed(module: torch.nn.Module, q: torch.Tensor) -> torch.Tensor:
    """Return queries of latents [tokens, heads, rank + rope] for those of keys [tokens, heads, nope + rope]."""
    keys, _ = _projections(module)
    nope = keys.shape[1]
    return torch.cat([torch.einsum("thn,hnr->thr", q[..., :nope], keys), q[..., nope:]], -1)


def values_of(module: torch.nn.Module, out: torch.Tensor) -> torch.Tensor:
    """Return outputs [tokens, heads, v] for what attention over latents returns, [tokens, heads, rank]."""
    _, values = _projections(module)
    return torch.einsum("thr,hvr->thv", out, values)


def _projections(module: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the up-projections of keys [heads, nope, rank] and of values [heads, v, rank], views of the weight."""
    weight = module.get_submodule("kv_b_proj").get_parameter("weight")
    nope, values = size_of(module, "qk_nope_head_dim"), size_of(module, "v_head_dim")
    heads = weight.view(-1, nope + values, weight.shape[-1])
    return heads[:, :nope], heads[:, nope:]


def size_of(module: torch.nn.Module, name: str) -> int:
    """Return a size that a module of transformers has as an attribute."""
    return int(getattr(module, name))
