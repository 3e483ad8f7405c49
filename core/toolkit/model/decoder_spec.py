"""What a dense decoder is made of, read from a config.json. No torch, no transformers.

The defaults for keys that a config leaves out are those of transformers' config classes, since that is how such a file
was meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.layers import KVGroupSpec, KVKind, LayerSpec, ModelSpec
from pegboard.core.toolkit.model.model_config import check_model_config, flag, number, size
from pegboard.core.toolkit.model.rope_spec import RopeSpec, rope_from_config

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "relu")
"""Values of `hidden_act` that `layers.activation` knows."""


@dataclass(frozen=True, slots=True)
class _Family:
    """How an architecture differs from Llama."""

    kv_heads: int | None = None
    head_dim: int | None = None
    max_position: int = 2048
    qkv_bias: bool = False
    bias_option: bool = False
    mlp_bias_option: bool = False
    qk_norm: bool = False


_FAMILIES = {
    "LlamaForCausalLM": _Family(bias_option=True, mlp_bias_option=True),
    "MistralForCausalLM": _Family(kv_heads=8, max_position=131072),
    "Qwen2ForCausalLM": _Family(kv_heads=32, max_position=32768, qkv_bias=True),
    "Qwen3ForCausalLM": _Family(kv_heads=32, head_dim=128, max_position=32768, bias_option=True, qk_norm=True),
}

ARCHITECTURES = tuple(_FAMILIES)
"""The entries of `architectures` that can be read."""


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A dense pre-norm decoder with rotary embeddings, RMS norms and a gated MLP.

    `windows` has, per layer, the number of keys a query sees (itself included), or None for all. Sizes are in elements.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    rms_norm_eps: float
    hidden_act: str
    max_position: int
    windows: tuple[int | None, ...]
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DecoderSpec:
        """Read a parsed config.json. Raises ModelError naming the key and its value where it is not understood."""
        check_model_config(config)
        architecture = _architecture(config)
        family = _FAMILIES[architecture]
        if config.get("quantization_config"):
            method = config["quantization_config"].get("quant_method", "unknown")
            raise ModelError(
                f"quantised checkpoints (quant_method {method!r}) are not supported; use unquantised weights"
            )
        hidden = size(config, "hidden_size")
        heads, kv_heads, head_dim = _heads(config, family, hidden)
        max_position = size(config, "max_position_embeddings", family.max_position)
        layers = size(config, "num_hidden_layers")
        bias = family.bias_option and flag(config, "attention_bias")
        return cls(
            architecture=architecture,
            vocab_size=size(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=size(config, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rope=rope_from_config(config, head_dim, max_position),
            rms_norm_eps=number(config, "rms_norm_eps", 1e-6),
            hidden_act=_activation(config),
            max_position=max_position,
            windows=_windows(architecture, config, layers),
            tied_embeddings=flag(config, "tie_word_embeddings"),
            qkv_bias=family.qkv_bias or bias,
            o_bias=bias,
            mlp_bias=family.mlp_bias_option and flag(config, "mlp_bias"),
            qk_norm=family.qk_norm,
        )

    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """Return the attention of every layer, all in KV group 0. A window is a mask only: the KV of all tokens is
        kept.
        """
        return tuple(
            LayerSpec(
                layer_id=i,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                qk_head_dim=self.head_dim,
                v_head_dim=self.head_dim,
                scale=self.head_dim**-0.5,
                window=window,
            )
            for i, window in enumerate(self.windows)
        )

    def model_spec(
        self, *, context_length: int | None = None, eos_token_ids: frozenset[int] = frozenset()
    ) -> ModelSpec:
        """Return the same as the pipeline sees it. `context_length` lowers the limit on prompt and output together.

        Raises ModelError where it is above what the model's positions allow.
        """
        if context_length is not None and context_length > self.max_position:
            raise ModelError(
                f"context_length {context_length} is above this model's max_position_embeddings {self.max_position}; "
                f"lower it, or raise max_position_embeddings in config.json if the rope parameters are meant for that"
            )
        return ModelSpec(
            architecture=self.architecture,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            max_context_len=context_length or self.max_position,
            layers=self.layer_specs(),
            kv_groups=(KVGroupSpec(KVKind.FULL, tuple(range(self.num_layers))),),
            eos_token_ids=eos_token_ids,
        )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    for name in names:
        if name in _FAMILIES:
            return str(name)
    stated = ", ".join(map(str, names)) or "none"
    raise ModelError(f"architecture {stated} is not one of {', '.join(ARCHITECTURES)}")


def _heads(config: Mapping[str, Any], family: _Family, hidden: int) -> tuple[int, int, int]:
    """Return the number of query heads and of KV heads, and the size of a head. Raise ModelError where they misfit."""
    heads = size(config, "num_attention_heads")
    kv_default = heads if config.get("num_key_value_heads", 0) is None else family.kv_heads or heads
    kv_heads = size(config, "num_key_value_heads", kv_default)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = size(config, "head_dim", family.head_dim or hidden // heads)
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim must be even for rotary embeddings, found {head_dim}")
    return heads, kv_heads, head_dim


def _activation(config: Mapping[str, Any]) -> str:
    name = config.get("hidden_act", "silu")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ModelError(f"config.json: hidden_act {name!r:.80} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return name


def _windows(architecture: str, config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Sliding windows per layer: everywhere in Mistral, by `layer_types` or `max_window_layers` in Qwen, else none."""
    if architecture == "LlamaForCausalLM":
        return (None,) * layers
    if architecture == "MistralForCausalLM":
        value = config.get("sliding_window", 4096)
        return (None if value is None else size(config, "sliding_window", 4096),) * layers
    if not flag(config, "use_sliding_window") or config.get("sliding_window", 4096) is None:
        return (None,) * layers
    window = size(config, "sliding_window", 4096)
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28)
        if type(first) is not int:
            raise ModelError(f"config.json: max_window_layers must be an integer, found {first!r:.80}")
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise ModelError(f"config.json: layer_types must be a list of names, found {types!r:.80}")
    if len(types) != layers:
        raise ModelError(f"config.json: layer_types has {len(types)} entries for {layers} layers")
    if unknown := set(types) - {"sliding_attention", "full_attention"}:
        raise ModelError(f"config.json: layer types {', '.join(sorted(unknown))} are not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
