"""The structure of a decoder, read from config.json. No torch, no transformers.

The defaults for keys that a config leaves out are those of transformers' config classes, since that is how such a file
was meant.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.layers import LayerSpec, ModelSpec
from pegboard.toolkit.model.kv_config import weights_are_plain
from pegboard.toolkit.model.kv_groups import grouped, groups_of
from pegboard.toolkit.model.model_config import check_model_config, flag, number, size
from pegboard.toolkit.model.moe_spec import MoeDefaults, MoeSpec, moe_from_config
from pegboard.toolkit.model.rope_spec import AXES, RopeDefaults, RopeSpec, rope_from_config, without_dual_chunks

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "relu")
"""Values of `hidden_act` that `layers.activation` knows."""


class _Windows(enum.Enum):
    """Which layers have a sliding window."""

    NONE = "none"
    ALL = "all"
    LISTED = "listed"
    """Those that `layer_types` lists, all without it: with it transformers takes a Mistral for a Ministral."""
    SWITCHED = "switched"
    """All, where the config enables them."""
    BY_LAYER = "by layer"
    """Where the config enables them, by `layer_types` or from `max_window_layers` on."""


@dataclass(frozen=True, slots=True)
class _Family:
    """How an architecture differs from Llama.

    A `tower` is the text part of a model with media: its config may stand in `text_config`.
    """

    kv_heads: int | None = None
    head_dim: int | None = None
    max_position: int = 2048
    rope: RopeDefaults | None = None
    moe: MoeDefaults | None = None
    rms_norm_eps: float = 1e-6
    windows: _Windows = _Windows.NONE
    window: int | None = 4096
    window_layers: int = 28
    qkv_bias: bool = False
    bias_option: bool = False
    mlp_bias_option: bool = False
    qk_norm: bool = False
    tower: bool = False
    tied_by_either: bool = False


_QWEN2_VL = _Family(
    kv_heads=8,
    max_position=32768,
    rope=RopeDefaults(theta=1e6, sections=(16, 24, 24)),
    rms_norm_eps=1e-5,
    windows=_Windows.BY_LAYER,
    window_layers=80,
    qkv_bias=True,
    tower=True,
    tied_by_either=True,
)

_QWEN3_VL = _Family(
    kv_heads=32,
    head_dim=128,
    max_position=128000,
    rope=RopeDefaults(theta=5e5, sections=(24, 20, 20), interleaved=True),
    bias_option=True,
    qk_norm=True,
    tower=True,
)

_FAMILIES = {
    "LlamaForCausalLM": _Family(bias_option=True, mlp_bias_option=True),
    "MistralForCausalLM": _Family(kv_heads=8, max_position=131072, windows=_Windows.LISTED),
    "MixtralForCausalLM": _Family(
        kv_heads=8,
        max_position=131072,
        rope=RopeDefaults(theta=1e6),
        rms_norm_eps=1e-5,
        windows=_Windows.ALL,
        window=None,
        moe=MoeDefaults(8, 2, 14336, normalised=True, size_key="intermediate_size"),
    ),
    "Qwen2ForCausalLM": _Family(kv_heads=32, max_position=32768, qkv_bias=True, windows=_Windows.BY_LAYER),
    "Qwen3ForCausalLM": _Family(
        kv_heads=32, head_dim=128, max_position=32768, bias_option=True, qk_norm=True, windows=_Windows.BY_LAYER
    ),
    "Qwen3MoeForCausalLM": _Family(
        kv_heads=4,
        max_position=32768,
        bias_option=True,
        qk_norm=True,
        windows=_Windows.SWITCHED,
        moe=MoeDefaults(num_experts=128, per_token=8, intermediate_size=768, normalised=False),
    ),
    "Qwen2VLForConditionalGeneration": _QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2_VL,
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": replace(
        _QWEN3_VL,
        kv_heads=16,
        head_dim=None,
        moe=MoeDefaults(num_experts=60, per_token=4, intermediate_size=1408, normalised=True),
    ),
}

ARCHITECTURES = tuple(_FAMILIES)
"""The entries of `architectures` that can be read."""


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A pre-norm decoder with rotary embeddings, RMS norms and a gated MLP, or experts in the layers that `moe` says.

    `windows` has, per layer, the number of keys a query sees (itself included), or None for all. Layers whose window is
    one of `window_groups` are in KV groups of their own; in group 0 a window is a mask only. A `tower` is the text
    part of a model with media, whose checkpoint has other parts as well. `section` has the layers that this process
    computes, None: all of them. Sizes are in elements.
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
    tower: bool = False
    moe: MoeSpec | None = None
    window_groups: tuple[int, ...] = ()
    section: range | None = None

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def position_axes(self) -> int:
        """Axes of a position in prompts with media: 3, or 1 where positions are plain."""
        return AXES if self.rope.axes else 1

    @classmethod
    def from_config(cls, config: Mapping[str, object], *, coded: bool = False) -> DecoderSpec:
        """Read a parsed config.json. Raises ModelError naming the key and its value where it is not understood, and for
        quantised weights unless the caller reads them `coded` (see `toolkit.model.coded`).
        """
        check_model_config(config)
        architecture = _architecture(config)
        family = _FAMILIES[architecture]
        text = _text_config(config, family)
        _check_causal(config, text)
        if not coded:
            _refuse_quantised(config, text)
        hidden = size(text, "hidden_size")
        heads, kv_heads, head_dim = _heads(text, family, hidden)
        max_position = without_dual_chunks(size(text, "max_position_embeddings", family.max_position), text)
        rope = rope_from_config(text, head_dim, max_position, family.rope)
        layers = size(text, "num_hidden_layers")
        bias = family.bias_option and flag(text, "attention_bias")
        return cls(
            architecture=architecture,
            vocab_size=size(text, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=size(text, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rope=rope,
            rms_norm_eps=number(text, "rms_norm_eps", family.rms_norm_eps),
            hidden_act=_activation(text),
            max_position=rope.context,
            windows=_windows(text, family, layers),
            tied_embeddings=_tied(config, text, family),
            qkv_bias=family.qkv_bias or bias,
            o_bias=bias,
            mlp_bias=family.mlp_bias_option and flag(text, "mlp_bias"),
            qk_norm=family.qk_norm,
            tower=family.tower,
            moe=moe_from_config(text, layers, family.moe) if family.moe else None,
        )

    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """Return the attention of every layer of the section."""
        layers = (
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
            if self.section is None or i in self.section
        )
        return grouped(layers, self.window_groups)

    def model_spec(
        self, *, context_length: int | None = None, eos_token_ids: frozenset[int] = frozenset()
    ) -> ModelSpec:
        """Return the same as the pipeline sees it. `context_length` lowers the limit on prompt and output together.

        Raises ModelError where it is above what the model's positions allow.
        """
        if context_length is not None and context_length > self.max_position:
            raise ModelError(
                f"context_length {context_length} is above the {self.max_position} tokens of this model's config.json "
                "(max_position_embeddings, or what yarn extends it to; with dual_chunk_attention_config what the model "
                "was trained with); lower it, or raise max_position_embeddings there if the rope parameters are meant "
                "for that"
            )
        layers = self.layer_specs()
        return ModelSpec(
            architecture=self.architecture,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            max_context_len=context_length or self.max_position,
            layers=layers,
            kv_groups=groups_of(layers),
            eos_token_ids=eos_token_ids,
            position_axes=self.position_axes,
        )


def _architecture(config: Mapping[str, object]) -> str:
    names = config.get("architectures") or []
    assert isinstance(names, list), "check_model_config has seen it"
    for name in names:
        if name in _FAMILIES:
            return str(name)
    stated = ", ".join(map(str, names)) or "none"
    raise ModelError(f"architecture {stated} is not one of {', '.join(ARCHITECTURES)}")


def _text_config(config: Mapping[str, object], family: _Family) -> Mapping[str, object]:
    """Return the part of a config that describes the decoder: `text_config`, or all of it in older files."""
    text = config.get("text_config") if family.tower else None
    return text if isinstance(text, Mapping) and text else config


def _check_causal(*parts: Mapping[str, object]) -> None:
    """Raise ModelError for a model that attends in both directions, as encoders for embeddings made of decoders do.
    transformers takes any false value for that, null too.
    """
    for part in parts:
        if not part.get("is_causal", True):
            raise ModelError(
                f"config.json: is_causal is {part['is_causal']!r:.80}: the model attends to later tokens as well, "
                "which is not supported; serve an embedding model with causal attention"
            )


def _refuse_quantised(*parts: Mapping[str, object]) -> None:
    for part in parts:
        given = part.get("quantization_config")
        if given and not weights_are_plain(given):
            method = given.get("quant_method", "unknown") if isinstance(given, Mapping) else given
            raise ModelError(
                f"quantised checkpoints (quant_method {method!r}) are not supported; use unquantised weights"
            )


def _tied(config: Mapping[str, object], text: Mapping[str, object], family: _Family) -> bool:
    """Return whether the output projection is the embeddings. The whole model's config decides and the decoder's where
    that is silent; of Qwen2-VL's, transformers ties where either says so.
    """
    outer, inner = flag(config, "tie_word_embeddings"), flag(text, "tie_word_embeddings")
    silent = config.get("tie_word_embeddings") is None
    return inner if silent else outer or (family.tied_by_either and inner)


def _heads(config: Mapping[str, object], family: _Family, hidden: int) -> tuple[int, int, int]:
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


def _activation(config: Mapping[str, object]) -> str:
    name = config.get("hidden_act", "silu")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ModelError(f"config.json: hidden_act {name!r:.80} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return name


def _windows(config: Mapping[str, object], family: _Family, layers: int) -> tuple[int | None, ...]:
    """Sliding windows per layer, see `_Windows`."""
    if family.windows is _Windows.NONE:
        return (None,) * layers
    types = config.get("layer_types")
    if family.windows in (_Windows.ALL, _Windows.LISTED):
        value = config.get("sliding_window", family.window)
        window = None if value is None else size(config, "sliding_window", family.window)
        listed = family.windows is _Windows.LISTED and types is not None
        return _of_types(types, window, layers) if listed else (window,) * layers
    if not flag(config, "use_sliding_window") or config.get("sliding_window", 4096) is None:
        return (None,) * layers
    window = size(config, "sliding_window", 4096)
    if family.windows is _Windows.SWITCHED:
        return (window,) * layers
    if types is None:
        first = config.get("max_window_layers", family.window_layers)
        if type(first) is not int:
            raise ModelError(f"config.json: max_window_layers must be an integer, found {first!r:.80}")
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return _of_types(types, window, layers)


def _of_types(types: object, window: int | None, layers: int) -> tuple[int | None, ...]:
    """Return the windows of layers whose types the config lists."""
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise ModelError(f"config.json: layer_types must be a list of names, found {types!r:.80}")
    if len(types) != layers:
        raise ModelError(f"config.json: layer_types has {len(types)} entries for {layers} layers")
    if unknown := set(types) - {"sliding_attention", "full_attention"}:
        raise ModelError(f"config.json: layer types {', '.join(sorted(unknown))} are not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
