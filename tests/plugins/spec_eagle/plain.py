"""EAGLE stated plainly: heads of transformers' parts, which compute whole sequences anew, one path at a time."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.plugins.spec_eagle.heads import LAYERS, Head


class PlainHead(nn.Module):
    """A head over `target`, a model of transformers'."""

    def __init__(self, directory: Path, head: Head, target: Any) -> None:
        from transformers import LlamaConfig, Qwen3Config
        from transformers.models.llama import modeling_llama as llama
        from transformers.models.qwen3 import modeling_qwen3 as qwen3

        super().__init__()
        config = json.loads((directory / "config.json").read_text())
        stored = load_file(directory / "model.safetensors")
        self.weights = {
            name.removeprefix("model.").replace("midlayer.", "layers.0."): one for name, one in stored.items()
        }
        self.head, self.config, self.target = head, config, target
        given = config.get("transformer_layer_config", config)
        kept = {key: value for key, value in given.items() if key not in ("architectures", "model_type")}
        biased = {"attention_bias": "layers.0.self_attn.q_proj.bias" in self.weights}
        biased |= {"mlp_bias": "layers.0.mlp.gate_proj.bias" in self.weights}
        if given["model_type"] == "qwen3":
            self.llama = Qwen3Config(**kept, attn_implementation="eager")
            attention, mlp, rope = qwen3.Qwen3Attention, qwen3.Qwen3MLP, qwen3.Qwen3RotaryEmbedding
        else:
            self.llama = LlamaConfig(**kept | biased, attn_implementation="eager")
            attention, mlp, rope = llama.LlamaAttention, llama.LlamaMLP, llama.LlamaRotaryEmbedding
        self.attention, self.mlp = attention(self.llama, 0), mlp(self.llama)
        if head.eagle3:
            for name in ("q_proj", "k_proj", "v_proj"):
                made = getattr(self.attention, name)
                setattr(self.attention, name, nn.Linear(2 * head.hidden, made.out_features, made.bias is not None))
        self.rope = rope(self.llama)
        self._fill("layers.0.self_attn.", self.attention)
        self._fill("layers.0.mlp.", self.mlp)
        self.ids = None
        if "d2t" in self.weights:
            self.ids = self.weights["d2t"] + torch.arange(len(self.weights["d2t"]))

    def _fill(self, prefix: str, module: nn.Module) -> None:
        own = {name.removeprefix(prefix): one for name, one in self.weights.items() if name.startswith(prefix)}
        module.load_state_dict(own, strict=True)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """RMS norm, in float32 throughout."""
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.llama.rms_norm_eps)
        return scaled * self.weights[f"{name}.weight"] if f"{name}.weight" in self.weights else x

    def linear(self, name: str, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def states(self, context: tuple[int, ...]) -> Tensor:
        """Return what the head reads of the model at each token of a context, [tokens, hidden]."""
        return _states(self, context)

    def embeds(self, ids: list[int]) -> Tensor:
        table = self.weights.get("embed_tokens.weight")
        table = self.target.get_input_embeddings().weight if table is None else table
        return table[torch.tensor(ids)]

    def layer(self, embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return outputs [n, hidden], and keys and values [n, kv heads, dim], of entries [n, hidden] from the first."""
        if self.head.eagle3:
            normed = self.norm("layers.0.hidden_norm", states)
            residual = normed if self.config.get("norm_before_residual") else states
            x = torch.cat([self.norm("layers.0.input_layernorm", embeds), normed], -1)
        else:
            residual = self.linear("fc", torch.cat([embeds, states], -1))
            x = self.norm("layers.0.input_layernorm", residual)
        count = len(x)
        rotation = self.rope(x[None], torch.arange(count)[None])
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        kept: dict[str, Tensor] = {}

        class Cache:
            def update(self, k: Tensor, v: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
                kept["k"], kept["v"] = k[0].transpose(0, 1), v[0].transpose(0, 1)
                return k, v

        attended = self.attention(x[None], rotation, mask, past_key_values=Cache())[0][0]
        x = residual + attended
        return x + self.mlp(self.norm("layers.0.post_attention_layernorm", x)), kept["k"], kept["v"]

    def fed_back(self, outputs: Tensor) -> Tensor:
        """Return the states that drafted tokens' entries are made of."""
        return self.norm("norm", outputs) if self.config.get("norm_output") else outputs

    def probabilities(self, output: Tensor) -> list[tuple[float, int]]:
        """Return (probability, id) of what may follow an output [hidden], the most probable first."""
        normed = self.norm("norm", output)
        if self.head.eagle3 and "lm_head.weight" in self.weights:
            logits = self.linear("lm_head", normed)
        else:
            logits = self.target.get_output_embeddings()(normed)
        ids = range(len(logits)) if self.ids is None else self.ids.tolist()
        return sorted(zip(logits.double().softmax(0).tolist(), ids, strict=True), reverse=True)

    def entries(self, context: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return keys and values of the entries of all tokens of a context but the first."""
        embeds, states = self.embeds(list(context[1:])), self.states(context[:-1])
        return self.layer(embeds, states)[1:]

    def tree(self, context: tuple[int, ...], topk: int, steps: int, nodes: int) -> tuple[list[int], list[int]]:
        """Return tokens and parents of the tree behind a context, whose last token is the newest.

        Each of the best `topk` nodes of a level has `topk` children; a node's score is the product of the probabilities
        on its path; the best `nodes` - 1 of all of them make the tree.
        """
        base, states = self.embeds(list(context[1:])), self.states(context[:-1])
        output = self.layer(base, states)[0][-1]
        children = self.probabilities(output)[:topk]
        found = [(score, place, token, -1) for place, (score, token) in enumerate(children)]
        frontier: list[tuple[Any, ...]] = [(*one, [one[2]], [self.fed_back(output)]) for one in found]
        for _ in range(1, steps):
            below: list[tuple[Any, ...]] = []
            for score, place, _, _, path, before in frontier:
                embeds, all_states = torch.cat([base, self.embeds(path)]), torch.cat([states, torch.stack(before)])
                output = self.layer(embeds, all_states)[0][-1]
                for more, token in self.probabilities(output)[:topk]:
                    after = [*before, self.fed_back(output)]
                    below.append((score * more, len(found) + len(below), token, place, [*path, token], after))
            found += [one[:4] for one in below]
            frontier = sorted(below, key=lambda one: -one[0])[:topk]
        best = sorted(sorted(found, key=lambda one: (-one[0], one[1]))[: nodes - 1], key=lambda one: one[1])
        at = {-1: 0} | {place: index for index, (_, place, _, _) in enumerate(best, start=1)}
        return [context[-1], *(token for _, _, token, _ in best)], [-1, *(at[parent] for *_, parent in best)]


@functools.lru_cache(maxsize=4096)
def _states(head: PlainHead, context: tuple[int, ...]) -> Tensor:
    with torch.inference_mode():
        answer = head.target(torch.tensor([context]), output_hidden_states=True)
    inputs = [one[0] for one in answer.hidden_states]
    if not head.head.eagle3:
        return inputs[-1]  # transformers' last one is normed
    stated = head.config.get("eagle_aux_hidden_state_layer_ids") or [2, LAYERS // 2, LAYERS - 3]
    taps = [inputs[place] for place in stated]
    if head.config.get("fc_norm"):
        taps = [head.norm(f"fc_norm.{index}", tap) for index, tap in enumerate(taps)]
    joined = torch.cat(taps, -1)
    if head.config.get("norm_before_fc"):
        joined = head.norm("input_norm", joined)
    return head.linear("fc", joined)
