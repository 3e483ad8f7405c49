"""What a model of transformers asks of attention, found by running it once without weights.

The model is built on torch's meta device from its config alone (milliseconds, no memory) and runs over a few tokens of
nothing, while every attention call is recorded: which module calls, how many heads, which scale, window, soft cap and
sinks, and which mask was asked for. No table of architectures has to be kept, and what our paged attention cannot
do is seen before any weight is read.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from pegboard.core.interfaces.layers import LayerSpec
from pegboard.plugins.model_transformers import bridge
from pegboard.plugins.model_transformers.head import Head
from pegboard.plugins.model_transformers.latent import is_latent, keep_latents, size_of

TOKENS = 5
"""How many tokens the recorded forward pass has; any number that is not a size of a model."""

_TENSORS_UNDERSTOOD = frozenset({"s_aux", "position_ids", "cache_position"})


class NotServable(Exception):
    """Why paged attention cannot serve the model; completes the sentence "X ...". `supports` hands the text on."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What a run without weights has shown.

    `modules` are the qualified names of the attention modules, one per entry of `layers`. `body` is the qualified
    name of the module that turns tokens into final hidden states, `body_output` the type of what it returns; see
    `head`.
    """

    layers: tuple[LayerSpec, ...]
    modules: tuple[str, ...]
    body: str
    body_output: type
    vocab_size: int
    hidden_size: int
    parameters: int
    """Numbers in all weights, tied ones counted once."""


@dataclass(slots=True)
class _Recorder(bridge.Handler):
    calls: list[bridge.AttentionCall] = field(default_factory=list)

    def attend(self, call: bridge.AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        width = size_of(call.module, "v_head_dim") if is_latent(call.module) else call.value.shape[3]
        return call.query.new_empty(1, call.query.shape[2], call.query.shape[1], width)


def trace(hf_config: Mapping[str, object], max_context_len: int) -> Trace:
    """Run the model of `hf_config` without weights.

    `max_context_len` is how far masks are looked at: a chunk or a window longer than that is none. Answers are
    remembered. Raises NotServable where paged attention cannot serve the model.
    """
    return _trace(json.dumps(hf_config, sort_keys=True, default=str), max_context_len)


@lru_cache(maxsize=16)
def _trace(config_json: str, max_context_len: int) -> Trace:
    model = _build(json.loads(config_json))
    _refuse_other_state(model)
    recorder = _Recorder()
    with torch.inference_mode(), bridge.handled_by(recorder), bridge.masks_recorded() as masks:
        with _static_rope(model), _callees(model, recorder) as callees, _data_needed():
            logits = _run(model)
        body = _body(callees)
        names = {module: name for name, module in model.named_modules()}
        modules = tuple(names[call.module] for call in recorder.calls)
        _check_modules(model, modules)
        layers = tuple(
            _layer(index, call, name, masks, max_context_len)
            for index, (call, name) in enumerate(zip(recorder.calls, modules, strict=True))
        )
        hidden = hidden_states(body.output)
        found = Trace(
            layers=layers,
            modules=modules,
            body=names[body.module],
            body_output=tuple if isinstance(body.output, tuple) else type(body.output),
            vocab_size=int(logits.shape[-1]),
            hidden_size=int(hidden.shape[-1]),
            parameters=sum(weight.numel() for weight in model.parameters()),
        )
        _check_head(model, found, hidden[0], recorder)
    return found


@contextmanager
def _data_needed() -> Iterator[None]:
    """Give what code raises that needs values where there are none as the reason that it is."""
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as err:
        first = (str(err).strip() or type(err).__name__).splitlines()[0]
        raise NotServable(
            f"does not run without its weights and tokens, so nothing is known of its attention ({first})"
        ) from err


def config_of(hf_config: Mapping[str, object]) -> Any:
    """Return transformers' own config object for a parsed config.json, which says nothing of quantised weights: its
    quantizers are never called. Raises NotServable.
    """
    read = _config_reader(hf_config)
    try:
        return read(
            {
                key: _number(value)
                for key, value in hf_config.items()
                if key not in {"quantization_config", "model_type"}
            }
        )
    except Exception as err:  # config classes validate with exceptions of many kinds
        raise NotServable(f"has a config.json that transformers refuses: {' '.join(str(err).split())}") from err


def _number(value: object) -> object:
    """Return a config's value with numbers that JSON lacks, which transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        number = value.get("__float__")
        return float(number) if isinstance(number, str) else {key: _number(part) for key, part in value.items()}
    return [_number(part) for part in value] if isinstance(value, list) else value


def _config_reader(hf_config: Mapping[str, object]) -> Callable[[Mapping[str, object]], object]:
    """Return what makes a model's config of a mapping: by its type, or, where transformers does not know the type, by
    its architecture. Kimi K2 has a type of its own, and the architecture of DeepSeek-V3.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type, names = hf_config.get("model_type"), hf_config.get("architectures")
    if not isinstance(model_type, str):
        raise NotServable(f"has model_type {model_type!r}, which transformers does not know")
    if model_type in CONFIG_MAPPING:
        by_type: Callable[[Mapping[str, object]], object] = CONFIG_MAPPING[model_type].from_dict
        return by_type
    name = names[0] if isinstance(names, list) and names else None
    model_class = getattr(transformers, name, None) if isinstance(name, str) else None
    if model_class is None:
        raise NotServable(f"has model_type {model_type!r}, which transformers does not know")
    by_architecture: Callable[[Mapping[str, object]], object] = model_class.config_class.from_dict
    return by_architecture


def _build(hf_config: Mapping[str, object]) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    config = config_of(hf_config)
    bridge.register()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config,
                attn_implementation=bridge.TRACED,
                # Experts by gathering: looping over those that were hit would need the router's values.
                experts_implementation="batched_mm",
                trust_remote_code=False,
            )
    except Exception as err:  # whatever a wrong size raises in a constructor
        raise NotServable(f"cannot be built from its config.json: {' '.join(str(err).split())}") from err
    built: torch.nn.Module = model.eval()
    keep_latents(built, bridge.is_handled)
    return built


def _refuse_other_state(model: torch.nn.Module) -> None:
    """Convolutions over tokens and recurrent layers keep a state that is not keys and values."""
    if getattr(model, "_is_stateful", False):
        raise NotServable("keeps a recurrent state, which paged keys and values cannot hold")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Conv1d | torch.nn.RNNBase):
            raise NotServable(f"mixes tokens outside of attention, in {name} ({type(module).__name__})")


@contextmanager
def _static_rope(model: Any) -> Iterator[None]:
    """Hold rotary embeddings still whose frequencies depend on values of positions, which the meta device does not
    have.

    They change nothing of what is recorded; whether a model may have them at all is decided in `limits`.
    """
    changed = []
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str | dict):
            changed.append((module, kind))
            module.rope_type = "default" if isinstance(kind, str) else dict.fromkeys(kind, "default")
    try:
        yield
    finally:
        for module, kind in changed:
            module.rope_type = kind


@dataclass(slots=True)
class _Callee:
    """A module that the causal language model's own forward pass calls directly, and how often it attends inside."""

    module: torch.nn.Module
    output: Any = None
    calls: int = 0


@contextmanager
def _callees(model: torch.nn.Module, recorder: _Recorder) -> Iterator[list[_Callee]]:
    """Collect the direct callees of the forward pass inside the block, in order."""
    callees: list[_Callee] = []
    depth = 0

    def enter(module: torch.nn.Module, _: object) -> None:
        nonlocal depth
        if depth == 1:
            callees.append(_Callee(module, calls=-len(recorder.calls)))
        depth += 1

    def leave(_: torch.nn.Module, __: object, output: object) -> None:
        nonlocal depth
        depth -= 1
        if depth == 1:
            callees[-1].output = output
            callees[-1].calls += len(recorder.calls)

    handles = []
    for module in model.modules():
        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield callees
    finally:
        for handle in handles:
            handle.remove()


def _run(model: torch.nn.Module) -> torch.Tensor:
    """Return logits [1, TOKENS, vocab] of a forward pass over nothing."""
    tokens = torch.zeros((1, TOKENS), dtype=torch.long, device="meta")
    output = model(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),  # given, so that none looks at positions to find packed sequences
        position_ids=torch.zeros_like(tokens),
        use_cache=False,
    )
    logits: torch.Tensor = output.logits
    return logits


def hidden_states(output: Any) -> torch.Tensor:
    """Return the final hidden states [1, tokens, hidden] in what a body returns."""
    hidden = output[0] if isinstance(output, tuple) else output.last_hidden_state
    assert isinstance(hidden, torch.Tensor)
    return hidden


def _body(callees: list[_Callee]) -> _Callee:
    """Return the one part of the model that attends."""
    attending = [one for one in callees if one.calls]
    if not attending:
        raise NotServable("never calls transformers' attention interface, so its attention cannot be replaced")
    if len(attending) > 1:
        raise NotServable("attends in more than one part of its forward pass")
    body = attending[0]
    if "position_ids" not in inspect.signature(body.module.forward).parameters:
        raise NotServable("takes no positions, so that requests cannot share a batch")
    return body


def _layer(
    index: int,
    call: bridge.AttentionCall,
    name: str,
    masks: Mapping[int, tuple[torch.Tensor, bridge.MaskFunction]],
    max_context_len: int,
) -> LayerSpec:
    """Return the LayerSpec of one recorded call. Raises NotServable for what no LayerSpec can say."""
    arguments = call.arguments
    for key, value in arguments.items():
        if isinstance(value, torch.Tensor) and key not in _TENSORS_UNDERSTOOD:
            raise NotServable(f"passes {key!r} to attention in {name}, which paged attention does not know")
    if call.query.shape[0] != 1 or call.query.shape[2] != TOKENS or call.key.shape[2] != TOKENS:
        raise NotServable(f"attends in {name} to something other than the request's own tokens")
    scaling = arguments.get("scaling")
    sinks = arguments.get("s_aux")
    try:
        return LayerSpec(
            layer_id=index,
            num_heads=int(call.query.shape[1]),
            num_kv_heads=int(call.key.shape[1]),
            qk_head_dim=int(call.key.shape[3]),
            v_head_dim=int(call.value.shape[3]),
            scale=float(call.query.shape[3] ** -0.5 if scaling is None else scaling),
            window=_window(call, name, masks, max_context_len),
            logit_cap=arguments.get("softcap"),
            num_sinks=0 if sinks is None else int(sinks.numel()),
            latent=is_latent(call.module),
        )
    except (ValueError, TypeError) as err:
        raise NotServable(f"attends in {name} in a way that a layer's description cannot say: {err}") from err


def _window(
    call: bridge.AttentionCall,
    name: str,
    masks: Mapping[int, tuple[torch.Tensor, bridge.MaskFunction]],
    max_context_len: int,
) -> int | None:
    """Return the sliding window that the mask of a call amounts to; its own eager attention would see nothing but the
    mask.
    """
    if call.mask is None:
        causal = call.arguments.get("is_causal")
        if causal is False or (causal is None and getattr(call.module, "is_causal", True) is False):
            raise NotServable(f"attends in both directions in {name}")
        window = call.arguments.get("sliding_window")
        return int(window) if window is not None and window < max_context_len else None
    base = call.mask if id(call.mask) in masks else call.mask._base
    if base is None or id(base) not in masks:
        raise NotServable(f"computes an attention mask of its own for {name}")
    return window_of(masks[id(base)][1], max_context_len, name)


def window_of(mask: bridge.MaskFunction, max_context_len: int, name: str) -> int | None:
    """Return the window of a causal mask function up to `max_context_len`, None where every earlier key is seen.

    Raises NotServable where the mask is neither causal nor a sliding window.
    """
    last = max_context_len - 1
    seen = _seen(mask, last, max_context_len, name)
    width = int(seen.sum())
    for position in sorted({0, last // 3, last // 2, max(0, min(width, last) - 1), min(width, last), last}):
        expected = torch.zeros(max_context_len + 1, dtype=torch.bool)
        expected[max(0, position + 1 - width) : position + 1] = True
        if not torch.equal(_seen(mask, position, max_context_len, name), expected):
            raise NotServable(
                f"masks attention in {name} in a way that is neither causal nor a sliding window (in both directions, "
                "or in chunks)"
            )
    return width if width < max_context_len else None


def _seen(mask: bridge.MaskFunction, position: int, max_context_len: int, name: str) -> torch.Tensor:
    """Return which keys [max_context_len + 1] the query at `position` sees."""
    zero = torch.zeros((), dtype=torch.long)
    keys = torch.arange(max_context_len + 1)
    try:
        seen = mask(zero, zero, torch.tensor(position), keys)
        return seen.expand_as(keys).clone()
    except Exception as err:  # a mask that looks into tensors which are not there
        raise NotServable(f"masks attention in {name} by something other than positions") from err


def _check_modules(model: Any, modules: tuple[str, ...]) -> None:
    twice = next((name for name in modules if modules.count(name) > 1), None)
    if twice is not None:
        raise NotServable(f"attends in {twice} more than once in a forward pass")
    declared = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    if isinstance(declared, int) and declared != len(modules):
        raise NotServable(
            f"attends in {len(modules)} of its {declared} layers; the others would keep a state of another kind"
        )


def _check_head(model: torch.nn.Module, found: Trace, hidden: torch.Tensor, recorder: _Recorder) -> None:
    """Check that the head works on hidden states alone, without running the body."""
    before = len(recorder.calls)
    with _data_needed():
        logits = Head(model, found.body, found.body_output).logits(hidden[:3])
    if len(recorder.calls) != before or logits.shape != (3, found.vocab_size):
        raise NotServable(f"computes no logits from the hidden states of {found.body} alone")
