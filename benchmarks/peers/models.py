"""The demo model as each peer wants it, in bf16: a Hugging Face directory and a GGUF file. Made once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from benchmarks.peers.environments import SetupError

DEMO = "smollm2-135m-instruct"
SMALL_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")

_QUANTISE = """
import ctypes, sys, llama_cpp
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_BF16
params.allow_requantize = True
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(params)))
"""


def demo_gguf() -> Path:
    """Return the demo model's own file, Q4_1. Raises PegboardError where it is not installed."""
    from pegboard.plugins.model_sources.demo import find_demo

    return find_demo(DEMO)


def bf16_directory(cache: Path) -> Path:
    """Return the demo model, converted as Pegboard converts it, with its weights rounded to bf16."""
    target = cache / "model" / "smollm2-bf16"
    if (target / "config.json").is_file():
        return target
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    from pegboard.plugins.model_sources.gguf.convert import convert_gguf
    from pegboard.toolkit.system.cache_dir import default_cache_dir

    source = convert_gguf(demo_gguf(), default_cache_dir())
    draft = target.with_name(f"{target.name}.{os.getpid()}")
    draft.mkdir(parents=True)
    weights = {}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                weights[name] = opened.get_tensor(name).to(torch.bfloat16)
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    for name in SMALL_FILES:
        shutil.copy(source / name, draft / name)
    config = json.loads((source / "config.json").read_text("utf-8"))
    (draft / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}, indent=2), "utf-8")
    # By one rename: whole or absent.
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)
    return target


def bf16_gguf(cache: Path, python: Path) -> Path:
    """Return the demo model's file with bf16 weights, by llama.cpp's own requantiser."""
    target = cache / "model" / "smollm2-bf16.gguf"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f"{target.name}.{os.getpid()}")
    done = subprocess.run(
        [str(python), "-c", _QUANTISE, str(demo_gguf()), str(draft)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SetupError(f"llama.cpp could not write the bf16 model:\n{done.stderr[-2000:]}")
    draft.rename(target)
    return target
