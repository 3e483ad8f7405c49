"""GB/s at which a checkpoint's weights reach the device: `python -m benchmarks.gpu.loading DIRECTORY [--device cpu]`.

The files are read once before, so that the system has them in memory: what is measured is not the disk.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from pegboard.core.interfaces.model_family import ModelContext
from pegboard.plugins.model_dense.family import DenseFamily
from pegboard.plugins.model_dense.options import DenseOptions


def main(arguments: Sequence[str] | None = None) -> None:
    """Load the network three times, and print each rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args(arguments)
    config = json.loads((given.directory / "config.json").read_text())
    device = torch.device(given.device)
    ctx = ModelContext(given.directory, config, getattr(torch, config["torch_dtype"]), device)
    size = sum(len(file.read_bytes()) for file in given.directory.glob("*.safetensors"))
    for _ in range(3):
        start = time.perf_counter()
        network = DenseFamily(DenseOptions(), ctx).load()
        if device.type == "cuda":
            torch.cuda.synchronize()
        took = time.perf_counter() - start
        print(f"{size / 1e9:.2f} GB in {took:.2f} s: {size / took / 1e9:.2f} GB/s", flush=True)
        del network


if __name__ == "__main__":
    main()
