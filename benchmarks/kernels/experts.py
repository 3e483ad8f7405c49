"""Mixtures of experts: Qwen3-30B-A3B, Mixtral 8x7B and gpt-oss, plain and in the layouts that are published most."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from benchmarks.kernels import Case, Target
from benchmarks.kernels.linear_triton import LAYOUTS, codes_of
from pegboard.plugins.linear_triton.options import TritonProductsOptions
from pegboard.plugins.linear_triton.products import TritonProducts
from pegboard.plugins.quantization.api import LinearContext
from pegboard.toolkit.kernels import experts
from pegboard.toolkit.model.linear import Part, Site

SHAPES = {"qwen3 128": (128, 8, 2048, 768), "mixtral 8": (8, 2, 4096, 14336), "gpt-oss 32": (32, 4, 2880, 2880)}
"""Experts, experts per token, hidden size and intermediate size."""
CODED = ("int4 128", "uint4 128 zeros", "e2m1 32", "e4m3 128x128", "e4m3 row")
TOKENS = (1, 64, 2048)


def _groups(target: Target, count: int, per_token: int, tokens: int) -> tuple[experts.Groups, torch.Tensor]:
    weights, chosen = experts.route(target.empty(tokens, count, dtype=torch.float32), per_token, normalised=True)
    return experts.grouped(chosen, count), weights


def _plain(target: Target, shape: tuple[int, int, int, int], tokens: int, dtype: torch.dtype, bias: bool) -> None:
    count, per_token, hidden, inter = shape
    groups, weights = _groups(target, count, per_token, tokens)
    up, down = target.empty(count, 2 * inter, hidden, dtype=dtype), target.empty(count, hidden, inter, dtype=dtype)
    added = target.empty(count, 2 * inter, dtype=dtype) if bias else None
    both = experts.product(target.empty(tokens, hidden, dtype=dtype), up, added, groups, gather=True)
    experts.combined(experts.product(both[:, :inter], down, None, groups, gather=False), weights, groups)


def _coded(target: Target, name: str, tokens: int) -> None:
    count, per_token, hidden, inter = 4, 2, 2048, 1024
    linears = TritonProducts(TritonProductsOptions(), LinearContext(torch.device("meta"), torch.bfloat16))
    layout = LAYOUTS[name]
    site = Site(0, (Part("weight", inter),), hidden, count)
    method = linears.build_experts(site, [[(layout, codes_of(layout, inter, hidden, "meta"))]] * count)
    groups, _ = _groups(target, count, per_token, tokens)
    method.apply(target.empty(tokens, hidden), groups, gather=True)
    method.apply(target.empty(groups.pairs, hidden), groups, gather=False)


def _cases() -> Iterator[Case]:
    for tokens in TOKENS:
        for name, shape in SHAPES.items():
            run = functools.partial(_plain, shape=shape, tokens=tokens, dtype=torch.bfloat16, bias="oss" in name)
            yield Case(f"experts {name}, {tokens} tokens", run, frozenset({"product_kernel"}))
        for name in CODED:
            run = functools.partial(_coded, name=name, tokens=tokens)
            yield Case(f"experts {name}, {tokens} tokens", run, frozenset({"expert_product_kernel"}))
    half = functools.partial(_plain, shape=SHAPES["qwen3 128"], tokens=64, dtype=torch.float32, bias=False)
    yield Case("experts qwen3 128, 64 tokens fp32", half)


CASES = tuple(_cases())
