"""Make a checkpoint of random weights in a real model's shape.

    python -m benchmarks.gpu.make_model SHAPE DIRECTORY [--no-weights] [--quantized int4|fp8]

Drawn on the GPU where there is one, written as 16-bit shards by several threads. Weights of norms are 1, so that
activations stay of ordinary size. The tokenizer is byte-level, with a word of its own for every id beyond the bytes, so
that any id has a text.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

Shapes = dict[str, tuple[int, ...]]

_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.02,
    "attention_bias": False,
    "max_position_embeddings": 32768,
}
_LLAMA = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
_QWEN3 = _COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
_MOE = _COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "tie_word_embeddings": True,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def _sizes(vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, dim: int) -> dict[str, int]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
    }


CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama-8b": _LLAMA | _sizes(128256, 4096, 14336, 32, 32, 8, 128),
    "qwen3-8b": _QWEN3 | _sizes(151936, 4096, 12288, 36, 32, 8, 128),
    "qwen3-0.6b": _QWEN3 | _sizes(151936, 1024, 3072, 28, 16, 8, 128) | {"tie_word_embeddings": True},
    "qwen3-moe-0.5b": _QWEN3 | _sizes(32768, 1024, 3072, 12, 16, 4, 64) | _MOE,
    "tiny": _LLAMA | _sizes(1024, 256, 512, 2, 4, 2, 64) | {"max_position_embeddings": 4096},
}


def shards(config: Mapping[str, Any]) -> Iterator[Shapes]:
    """Yield names and shapes of weights, a shard at a time: the embeddings, then a layer each."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    top: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        top["lm_head.weight"] = (config["vocab_size"], hidden)
    yield top
    for layer in range(config["num_hidden_layers"]):
        shapes: Shapes = {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            **_mlp(config),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        if config["model_type"].startswith("qwen3"):
            shapes |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
        yield {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}


def _mlp(config: Mapping[str, Any]) -> Shapes:
    """Return the shapes of a layer's MLP, or of its router and its experts."""
    hidden, experts = config["hidden_size"], config.get("num_experts", 0)
    inter = config["moe_intermediate_size"] if experts else config["intermediate_size"]
    parts = {"gate_proj": (inter, hidden), "up_proj": (inter, hidden), "down_proj": (hidden, inter)}
    if not experts:
        return {f"mlp.{part}": shape for part, shape in parts.items()}
    singles = {f"mlp.experts.{e}.{part}": shape for e in range(experts) for part, shape in parts.items()}
    return {"mlp.gate": (experts, hidden), **singles}


def write_tokenizer(directory: Path, vocab: int) -> None:
    """Write a byte-level tokenizer of `vocab` tokens, and a chat template."""
    # In the byte-level alphabet "Ġ" is a space: a token beyond the bytes reads as a word of its own.
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"Ġw{number}" for number in range(vocab - len(words))]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(about))


QUANTIZED: Mapping[str, dict[str, Any]] = {
    "int4": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
"""What a config says of the weights of layers: 4 bits in groups of 128, or float8 in blocks of 128 x 128."""


def draw_codes(kind: str, name: str, shape: tuple[int, ...], device: torch.device) -> dict[str, torch.Tensor]:
    """Return the tensors of a matrix whose numbers are about as large as those of `draw`."""
    rows, cols = shape
    if kind == "int4":
        return {
            f"{name}_packed": torch.randint(-(2**31), 2**31, (rows, cols // 8), dtype=torch.int32, device=device),
            f"{name}_scale": torch.full((rows, cols // 128), 0.02 / 4.6, dtype=torch.bfloat16),
            f"{name}_shape": torch.tensor([rows, cols]),
        }
    codes = torch.empty(rows, cols, dtype=torch.bfloat16, device=device).normal_(0.0, 64.0).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": torch.full((-(-rows // 128), -(-cols // 128)), 0.02 / 64)}


def draw(shapes: Shapes, device: torch.device, quantized: str | None = None) -> dict[str, torch.Tensor]:
    """Return weights on the CPU: in bfloat16, or those of layers `quantized`."""
    found: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        if quantized and "proj" in name:
            codes = draw_codes(quantized, name, shape, device)
            found |= {part: tensor.cpu() for part, tensor in codes.items()}
            continue
        weight = torch.empty(shape, dtype=torch.bfloat16, device=device)
        found[name] = (weight.fill_(1.0) if "norm" in name else weight.normal_(0.0, 0.02)).cpu()
    return found


def make(shape: str, directory: Path, *, with_weights: bool = True, quantized: str | None = None) -> int:
    """Write a checkpoint and return its bytes. Without weights it is for `model.load_format: dummy`."""
    config, device = CONFIGS[shape], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    directory.mkdir(parents=True, exist_ok=True)
    if quantized:
        config = {**config, "quantization_config": QUANTIZED[quantized]}
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory, config["vocab_size"])
    if not with_weights:
        return 0
    torch.manual_seed(0)
    parts, total = list(shards(config)), 0
    files: dict[str, str] = {}
    pending: list[Future[None]] = []
    with ThreadPoolExecutor(4) as pool:
        for number, shapes in enumerate(parts):
            file, weights = f"model-{number:05d}-of-{len(parts):05d}.safetensors", draw(shapes, device, quantized)
            files |= dict.fromkeys(weights, file)
            total += sum(weight.nbytes for weight in weights.values())
            pending.append(pool.submit(save_file, weights, str(directory / file)))
            if len(pending) > 6:  # so many shards are in memory at most
                pending.pop(0).result()
        for future in pending:
            future.result()
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def main(arguments: Sequence[str] | None = None) -> None:
    """Make a checkpoint and say how long it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=CONFIGS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--no-weights", action="store_true", help="config and tokenizer only")
    parser.add_argument("--quantized", choices=QUANTIZED, help="write the matrices of layers in fewer bits")
    given = parser.parse_args(arguments)
    start = time.perf_counter()
    total = make(given.shape, given.directory, with_weights=not given.no_weights, quantized=given.quantized)
    print(f"{given.shape}: {total / 1e9:.2f} GB in {time.perf_counter() - start:.1f} s, {given.directory}")


if __name__ == "__main__":
    main()
