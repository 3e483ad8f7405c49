"""Mixture-of-experts layers as a model's config describes them. No torch: `moe.py` does the arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pegboard.core.interfaces.errors import ModelError
from pegboard.toolkit.model.model_config import flag, size


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A router and its experts: `layers` says for each decoder layer whether it has them in place of one MLP.

    A token goes to the `per_token` best of `num_experts` gated MLPs of `intermediate_size`, whose weights are the
    router's softmax over all, divided by their own sum where they are `normalised`.
    """

    num_experts: int
    per_token: int
    intermediate_size: int
    normalised: bool
    layers: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class MoeDefaults:
    """What an architecture's experts are where a config does not say, and the key that says their size."""

    num_experts: int
    per_token: int
    intermediate_size: int
    normalised: bool
    size_key: str = "moe_intermediate_size"


def moe_from_config(config: Mapping[str, object], layers: int, defaults: MoeDefaults) -> MoeSpec:
    """Return the experts of a config.json under transformers' names. Raise ModelError for what cannot be."""
    key = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    experts = size(config, key, defaults.num_experts)
    per_token = size(config, "num_experts_per_tok", defaults.per_token)
    if per_token > experts:
        raise ModelError(f"config.json: num_experts_per_tok {per_token} is above {key} {experts}")
    return MoeSpec(
        num_experts=experts,
        per_token=per_token,
        intermediate_size=size(config, defaults.size_key, defaults.intermediate_size),
        normalised=flag(config, "norm_topk_prob", defaults.normalised),
        layers=_layers(config, layers),
    )


def _layers(config: Mapping[str, object], layers: int) -> tuple[bool, ...]:
    """Every layer whose number from 1 is a multiple of `decoder_sparse_step`, without `mlp_only_layers` from 0."""
    step = size(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(one) is int for one in dense):
        raise ModelError(f"config.json: mlp_only_layers must be a list of integers, found {dense!r:.80}")
    return tuple((index + 1) % step == 0 and index not in dense for index in range(layers))
