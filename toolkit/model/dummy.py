"""Random weights in place of a checkpoint's, for benchmarks and tests: vLLM's and SGLang's `load_format: dummy`."""

from __future__ import annotations

import torch

SCALE = 0.02


@torch.no_grad()
def draw_weights(network: torch.nn.Module, seed: int = 0) -> None:
    """Draw matrices from N(0, 0.02), and set norms to 1 and biases to 0, so that activations are of ordinary size.

    Where it is drawn matters: a CPU and a GPU have different generators.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for name, weight in network.named_parameters():
        generator = generators.setdefault(weight.device, torch.Generator(weight.device).manual_seed(seed))
        if name.rpartition(".")[2] == "bias":
            weight.zero_()
        elif weight.dim() == 1:
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, SCALE, generator=generator)
