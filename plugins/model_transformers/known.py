"""Modules that are known by what they compute, whatever they are called: norms, and gated MLPs.

Each is tried on random numbers with small weights of random numbers in place of its own, on the CPU, and compared with
a formula in float32. What differs by more than rounding, or cannot be tried, is not known, and stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations, product

import torch
from torch import Tensor, nn

from pegboard.plugins.model_transformers.experts import ExpertsModule
from pegboard.plugins.model_transformers.merged import is_linear
from pegboard.toolkit.kernels.operations import SiluGate
from pegboard.toolkit.model.layers import activation

_LARGEST_EPS = 1e-2
_CLOSE = 1e-5
"""Of the largest number of a row: float32 makes 1e-6. The two kinds of GELU differ by 3e-5 and more."""
_IN, _INSIDE = 12, 10
"""Sizes of the linear layers with which an MLP is tried."""
ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu", "relu")


@dataclass(frozen=True, slots=True)
class KnownNorm:
    """x * rsqrt(mean(x ** 2) + eps) * (weight + offset) over the last dimension; the offset is 0 or 1."""

    weight: str
    eps: float
    offset: float


def known_norm(module: nn.Module) -> KnownNorm | None:
    """Return what a module computes if it is a root mean square norm."""
    inner = next(module.children(), None) is not None or next(module.buffers(), None) is not None
    if inner or "forward" in vars(module):
        return None
    parameters = list(module.named_parameters())
    if len(parameters) != 1 or parameters[0][1].dim() != 1:
        return None
    (name, weight), draw = parameters[0], torch.Generator().manual_seed(0)
    tried = copied(module)
    drawn = torch.randn(weight.shape, generator=draw)
    tried._parameters = {name: nn.Parameter(drawn, requires_grad=False)}
    # One row is so small that eps matters.
    x = torch.randn(2, 3, len(drawn), generator=draw) * torch.tensor([3.0, 1.0, 1e-3])[:, None]
    found = _result(tried, x)
    for eps in {value for value in vars(module).values() if isinstance(value, float) and 0 < value < _LARGEST_EPS}:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        for offset in (0.0, 1.0):
            if equal(found, normed * (drawn + offset)):
                return KnownNorm(name, eps, offset)
    return None


@dataclass(frozen=True, slots=True)
class KnownMLP:
    """down(act(gate(x)) * up(x)), by names of child modules. `up` is None where one layer has the outputs of gate and
    then those of up.
    """

    gate: str
    up: str | None
    down: str
    act: str


def known_mlp(module: nn.Module) -> KnownMLP | None:
    """Return what a module computes if it is a gated MLP of linear layers."""
    children = dict(module.named_children())
    linears = [name for name, child in children.items() if is_linear(child)]
    others = [child for name, child in children.items() if name not in linears]
    if len(linears) not in (2, 3) or "forward" in vars(module):
        return None
    if next(module.parameters(recurse=False), None) is not None or any(list(child.parameters()) for child in others):
        return None
    for *first, down in permutations(linears):
        if _fit([children[name] for name in first], children[down]) and (found := _formula(module, first, down)):
            return found
    return None


def known_gate(module: ExpertsModule) -> SiluGate | None:
    """Return what the gate of a module of experts computes of [rows, 2 * size] if it is SiLU's, with numbers that the
    module has.
    """
    draw = torch.Generator().manual_seed(0)
    both = torch.randn(6, 2 * _INSIDE, generator=draw) * torch.tensor([1.0, 1e3]).repeat(3)[:, None]
    found = _result(module._apply_gate, both)
    numbers = {value for value in vars(module).values() if isinstance(value, float)}
    limits = [None, *(value for value in numbers if value > 0)]
    for interleaved, plus, alpha, limit in product((False, True), (0.0, 1.0), {1.0, *numbers}, limits):
        known = SiluGate(alpha, limit, plus, interleaved)
        if equal(found, known(both)):
            return known
    return None


def _fit(first: Sequence[nn.Module], down: nn.Module) -> bool:
    """Return whether sizes are those of an MLP's layers."""
    sizes = {layer.in_features for layer in first if isinstance(layer, nn.Linear)}
    outputs = sum(layer.out_features for layer in first if isinstance(layer, nn.Linear))
    return isinstance(down, nn.Linear) and sizes == {down.out_features} and outputs == 2 * down.in_features


def _formula(module: nn.Module, first: Sequence[str], down: str) -> KnownMLP | None:
    """Return the MLP that a module is with small random layers in place of its own."""
    draw = torch.Generator().manual_seed(0)
    tried = copied(module)
    layers = {name: small_linear(_IN, 2 * _INSIDE // len(first), draw) for name in first} | {
        down: small_linear(_INSIDE, _IN, draw)
    }
    tried._modules = {**tried._modules, **layers}
    # Some are so large that limits show.
    x = torch.randn(1, 6, _IN, generator=draw) * torch.tensor([1.0, 1e3]).repeat(3)[:, None]
    found = _result(tried, x)
    outputs = [layers[name](x) for name in first]
    gate, up = outputs if len(first) == 2 else outputs[0].chunk(2, -1)
    for name in ACTIVATIONS:
        if equal(found, layers[down](activation(name)(gate) * up)):
            return KnownMLP(first[0], first[1] if len(first) == 2 else None, down, name)
    return None


def small_linear(cols: int, rows: int, draw: torch.Generator) -> nn.Linear:
    """Return a layer [rows, cols] of random numbers."""
    layer = nn.Linear(cols, rows, device="meta")  # which draws nothing from the global generator
    layer.weight, layer.bias = (
        nn.Parameter(torch.randn(shape, generator=draw), requires_grad=False) for shape in ((rows, cols), (rows,))
    )
    return layer


def copied(module: nn.Module) -> nn.Module:
    """Return a module that shares all with another one, but can be given other parameters and children."""
    made = copy.copy(module)
    made.__dict__ = {**module.__dict__}
    return made


def _result(module: Callable[[Tensor], object], x: Tensor) -> Tensor | None:
    """Return what a module computes, None where it cannot be tried."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            found = module(x)
    except Exception:  # whatever code raises that is given other sizes than its own
        return None
    return found if isinstance(found, Tensor) else None


def equal(found: Tensor | None, expected: Tensor) -> bool:
    """Return whether both have the same rows but for rounding in float32."""
    if found is None or found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    # Each row by itself: some are small.
    error, size = (found - expected).abs().amax(-1), expected.abs().amax(-1)
    return bool((error <= _CLOSE * size).all())
