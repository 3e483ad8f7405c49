"""What an EAGLE head is made of, read from its config.json. No torch.

There are three layouts: SGLang's and SafeAILab's `LlamaForCausalLMEagle` (EAGLE-1 and 2, which share heads), their and
SpecForge's `LlamaForCausalLMEagle3`, and that of the package `speculators`, with the decoder in
`transformer_layer_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.layers import LayerSpec, ModelSpec
from pegboard.toolkit.model.decoder_spec import DecoderSpec
from pegboard.toolkit.model.model_config import flag, read_model_config

EAGLE, EAGLE3 = "LlamaForCausalLMEagle", "LlamaForCausalLMEagle3"
SPECULATORS = ("Eagle3Speculator", "Eagle3DraftModel")
ARCHITECTURES = (EAGLE, EAGLE3, *SPECULATORS)

_DECODERS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Layers that heads have, by `model_type`. SpecForge writes "llama" for heads of any model."""
_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """One decoder layer that reads states of the model, and what stands around it.

    `eagle3` says which of the two designs it is: the layer of EAGLE-1 and 2 reads one vector, made of an embedding and
    the model's last state; that of EAGLE-3 reads the embedding and a mixture of three states side by side. `taps` are
    their places, see `Taps`. `vocab_size` is that of the head's own logits; None: the model's head gives them.

    `norm_before_residual`: the layer adds to the normed state, not to the state. `norm_before_fc` and `fc_norm`: the
    three states are normed together, or each by itself, before they are mixed. `norm_output`: the next token's layer
    reads the normed output.
    """

    eagle3: bool
    decoder: DecoderSpec
    taps: tuple[int, ...]
    vocab_size: int | None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def layer(self, layer_id: int) -> LayerSpec:
        """Return the attention of its layer."""
        decoder = self.decoder
        return LayerSpec(
            layer_id,
            decoder.num_heads,
            decoder.num_kv_heads,
            decoder.head_dim,
            decoder.head_dim,
            decoder.head_dim**-0.5,
        )


def read_draft(directory: Path, model: ModelSpec, taps: tuple[int, ...] | None = None) -> DraftSpec:
    """Read the config of a head for `model`; `taps` are the places of an EAGLE-3 head's states where the operator says
    so. Raises ModelError naming the key and its value where it does not fit.
    """
    config = read_model_config(directory)
    try:
        return _draft(config, model, taps)
    except ModelError as error:
        raise ModelError(f"{directory / 'config.json'}: {str(error).removeprefix('config.json: ')}") from error


def _draft(config: Mapping[str, object], model: ModelSpec, taps: tuple[int, ...] | None) -> DraftSpec:
    names = config.get("architectures")
    known = [name for name in names if name in ARCHITECTURES] if isinstance(names, list) else []
    if not known:
        stated = ", ".join(map(str, names)) if isinstance(names, list) else "none"
        raise ModelError(
            f"architecture {stated} is none of {', '.join(ARCHITECTURES)}; where it is an EAGLE head all the same, "
            f"write {EAGLE} or {EAGLE3} there"
        )
    eagle3 = known[0] != EAGLE
    decoder = _decoder(config.get("transformer_layer_config") if known[0] in SPECULATORS else config)
    _check(config, decoder, model, eagle3=eagle3)
    last = len(model.layers) + 1
    places: tuple[int, ...] = (last,)
    if eagle3:
        places = _places(config, len(model.layers)) if taps is None else taps
    if taps is not None and not eagle3:
        raise ModelError("speculation.taps is for EAGLE-3; heads like this one read the last state alone")
    if any(not 0 <= place <= last for place in places):
        stated = _IDS if taps is None else "speculation.taps"
        raise ModelError(f"{stated}: the states {list(places)} are not all of a model of {len(model.layers)} layers")
    draft_vocab = _size(config, "draft_vocab_size")
    if draft_vocab is not None and draft_vocab > model.vocab_size:
        raise ModelError(f"draft_vocab_size {draft_vocab} is larger than the model's vocabulary, {model.vocab_size}")
    return DraftSpec(
        eagle3=eagle3,
        decoder=decoder,
        taps=places,
        vocab_size=draft_vocab if eagle3 else None,
        norm_before_residual=eagle3 and flag(config, "norm_before_residual"),
        norm_before_fc=eagle3 and flag(config, "norm_before_fc"),
        fc_norm=eagle3 and flag(config, "fc_norm"),
        norm_output=eagle3 and flag(config, "norm_output"),
    )


def _decoder(config: object) -> DecoderSpec:
    """Return the sizes of the head's layer, and its rope."""
    if not isinstance(config, Mapping):
        raise ModelError(f"transformer_layer_config must be an object, found {config!r:.80}")
    kind = config.get("model_type", "llama")
    if kind not in _DECODERS:
        raise ModelError(f"model_type {kind!r:.80} is none of {', '.join(_DECODERS)}")
    found = dict(config) | {"architectures": [_DECODERS[str(kind)]], "use_sliding_window": False}
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(rope, Mapping) and "mrope_section" in rope:
        # Of heads for models with media. Text has the same position on all axes, which is what one axis has.
        found["rope_scaling"] = {key: value for key, value in rope.items() if key != "mrope_section"}
        if "mrope" in (rope.get("type"), rope.get("rope_type")):
            found["rope_scaling"] |= {"type": "default", "rope_type": "default"}
    decoder = DecoderSpec.from_config(found)
    if decoder.num_layers != 1:
        raise ModelError(f"num_hidden_layers {decoder.num_layers}: heads of one layer are supported")
    return decoder


def _check(config: Mapping[str, object], decoder: DecoderSpec, model: ModelSpec, *, eagle3: bool) -> None:
    """Raise ModelError for a head of another model."""
    if decoder.vocab_size != model.vocab_size:
        raise ModelError(f"vocab_size {decoder.vocab_size} is not the model's, {model.vocab_size}")
    target = _size(config, "target_hidden_size") if eagle3 else None
    reads = decoder.hidden_size if target is None else target
    if reads != model.hidden_size:
        key = "hidden_size" if target is None else "target_hidden_size"
        raise ModelError(f"{key} {reads} is not the model's, {model.hidden_size}: the head is for another model")


def _size(config: Mapping[str, object], key: str) -> int | None:
    value = config.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value <= 0):
        raise ModelError(f"{key} must be a positive integer, found {value!r:.80}")
    return value


def _places(config: Mapping[str, object], layers: int) -> tuple[int, ...]:
    """Return whose inputs an EAGLE-3 head reads.

    In `eagle_config`, where SpecForge and SGLang have them, the numbers are those of layers whose outputs are read. The
    package `speculators` has them at the top, as vLLM counts: the inputs; but for lists that begin with 1, which vLLM
    takes for SpecForge's.
    """
    inner = config.get("eagle_config")
    if isinstance(inner, Mapping) and inner.get("use_aux_hidden_state") is False:
        raise ModelError("use_aux_hidden_state is off: EAGLE-3 heads that read one state are not supported")
    nested = inner.get(_IDS) if isinstance(inner, Mapping) else None
    stated = nested or config.get(_IDS)
    if not stated:
        return 2, layers // 2, max(0, layers - 3)
    if not isinstance(stated, list) or any(type(one) is not int for one in stated):
        raise ModelError(f"{_IDS} must be a list of layers, found {stated!r:.80}")
    outputs = bool(nested) or stated[0] == 1
    return tuple(one + 1 if outputs else one for one in stated)
