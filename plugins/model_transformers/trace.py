"""What a model of transformers asks of attention, found by running it once without weights.

The model is built on torch's meta device from its config alone (milliseconds, no memory) and runs over a few tokens of
nothing, while every attention call is recorded: which module calls, how many heads, which scale, window, soft cap and
sinks, and which mask was asked for. No table of architectures has to be kept, and what our paged attention cannot
do is seen before any weight is read.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from pegboard.core.interfaces.layers import LayerSpec
from pegboard.plugins.model_transformers import bridge
from pegboard.plugins.model_transformers.caches import CacheRecorder, UnknownState
from pegboard.plugins.model_transformers.configs import NotServable, config_of
from pegboard.plugins.model_transformers.experts import is_experts
from pegboard.plugins.model_transformers.head import Head, takes_positions
from pegboard.plugins.model_transformers.latent import absorbed_products, is_latent, keep_latents, size_of
from pegboard.plugins.model_transformers.masks import mask_window
from pegboard.plugins.model_transformers.merged import Inputs, with_one_input
from pegboard.plugins.model_transformers.rope import hold_rope_still
from pegboard.plugins.model_transformers.segments import CACHE_NAMES, StateModule
from pegboard.plugins.model_transformers.state_trace import Call, state_modules

TOKENS = 5
"""How many tokens the recorded forward pass has; any number that is not a size of a model."""

_TOKENWISE = frozenset({"mlp", "moe"})
"""Kinds of layers without attention and states."""

_TENSORS_UNDERSTOOD = frozenset({"s_aux", "position_ids", "cache_position"})


@dataclass(frozen=True, slots=True)
class Trace:
    """What a run without weights has shown.

    `modules` are the qualified names of the attention modules, one per entry of `layers`. `states` are the modules that
    keep states. `body` is the qualified name of the module that turns tokens into final hidden states, `body_output`
    the type of what it returns; see `head`.
    """

    layers: tuple[LayerSpec, ...]
    modules: tuple[str, ...]
    body: str
    body_output: type
    vocab_size: int
    hidden_size: int
    parameters: int
    """Numbers in all weights, tied ones counted once."""
    states: tuple[StateModule, ...] = ()
    one_input: tuple[tuple[str, ...], ...] = ()
    """Names of linear layers, in groups of those that read one input; see `merged`."""
    experts: Mapping[str, torch.nn.Module] = field(default_factory=dict)
    """Modules of experts by name, without weights."""


class _Recorder(bridge.Handler):
    """Notes every call of attention, and which states modules keep."""

    def __init__(self) -> None:
        self.calls: list[bridge.AttentionCall] = []
        self.running: list[torch.nn.Module] = []
        self.arguments: dict[torch.nn.Module, Call] = {}
        self.inputs: dict[torch.nn.Module, list[torch.Tensor]] = {}
        self.cache = CacheRecorder(lambda: self.running[-1])

    @property
    def noted(self) -> int:
        return len(self.calls) + len(self.cache.found)

    def attend(self, call: bridge.AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        width = size_of(call.module, "v_head_dim") if is_latent(call.module) else call.value.shape[3]
        return call.query.new_empty(1, call.query.shape[2], call.query.shape[1], width)


def trace(hf_config: Mapping[str, object], max_context_len: int, dtype: torch.dtype = torch.float32) -> Trace:
    """Run the model of `hf_config` in `dtype` without weights.

    `max_context_len` is how far masks are looked at: a chunk or a window longer than that is none. Answers are
    remembered. Raises NotServable where paged attention cannot serve the model.
    """
    return _trace(json.dumps(hf_config, sort_keys=True, default=str), max_context_len, dtype)


@lru_cache(maxsize=16)
def _trace(config_json: str, max_context_len: int, dtype: torch.dtype) -> Trace:
    model = _build(json.loads(config_json), dtype)
    recorder = _Recorder()
    with torch.inference_mode(), bridge.handled_by(recorder), bridge.masks_recorded() as masks:
        with _callees(model, recorder) as callees, _data_needed():
            logits = _run(model, recorder.cache)
        states = state_modules(model, recorder.cache, recorder.arguments.__getitem__)
        body = _body(callees, recorder)
        names = {module: name for name, module in model.named_modules()}
        modules = tuple(names[call.module] for call in recorder.calls)
        _check_modules(model, modules, states)
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
            states=states,
            one_input=with_one_input(model, _called(model, recorder)),
            experts={name: model.get_submodule(name) for name, one in model.named_modules() if is_experts(one)},
        )
        _check_head(model, found, hidden[0], recorder)
    return found


def _called(model: torch.nn.Module, recorder: _Recorder) -> Inputs:
    """Return the inputs of modules, but of those whose weights are applied elsewhere, which were called here alone."""
    absorbed = set(absorbed_products(model))
    return {module: given for module, given in recorder.inputs.items() if module not in absorbed}


@contextmanager
def _data_needed() -> Iterator[None]:
    """Give what code raises that needs values where there are none as the reason that it is."""
    try:
        yield
    except UnknownState as err:
        raise NotServable(f"keeps in transformers' cache what is not known here ({err})") from err
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


def _build(hf_config: Mapping[str, object], dtype: torch.dtype) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    config = config_of(hf_config)
    bridge.register()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=dtype,
                attn_implementation=bridge.TRACED,
                # Experts by gathering: looping over those that were hit would need the router's values.
                experts_implementation="batched_mm",
                trust_remote_code=False,
            )
    except Exception as err:  # whatever a wrong size raises in a constructor
        if bridge.TRACED in str(err):
            raise NotServable("has attention of its own, which transformers' interface does not replace") from err
        raise NotServable(f"cannot be built from its config.json: {' '.join(str(err).split())}") from err
    built: torch.nn.Module = model.eval()
    hold_rope_still(built)
    keep_latents(built, bridge.is_handled)
    return built


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

    def enter(module: torch.nn.Module, args: tuple[object, ...], named: dict[str, object]) -> None:
        nonlocal depth
        recorder.running.append(module)
        recorder.arguments[module] = args, named
        recorder.inputs.setdefault(module, []).extend(one for one in args[:1] if isinstance(one, torch.Tensor))
        if depth == 1:
            callees.append(_Callee(module, calls=-recorder.noted))
        depth += 1

    def leave(_: torch.nn.Module, __: object, output: object) -> None:
        nonlocal depth
        recorder.running.pop()
        depth -= 1
        if depth == 1:
            callees[-1].output = output
            callees[-1].calls += recorder.noted

    handles = []
    for module in model.modules():
        handles += [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]
    try:
        yield callees
    finally:
        for handle in handles:
            handle.remove()


def _run(model: torch.nn.Module, cache: CacheRecorder) -> torch.Tensor:
    """Return logits [1, TOKENS, vocab] of a forward pass over nothing."""
    tokens = torch.zeros((1, TOKENS), dtype=torch.long, device="meta")
    accepted = inspect.signature(model.forward).parameters
    given: dict[str, object] = {name: cache for name in CACHE_NAMES if name in accepted}
    if not given:
        given["attention_mask"] = torch.ones_like(tokens)  # else positions are looked at, to find packed sequences
    if "position_ids" in accepted:
        given["position_ids"] = torch.zeros_like(tokens)
    output = model(input_ids=tokens, use_cache=False, **given)
    logits: torch.Tensor = output.logits
    return logits


def hidden_states(output: Any) -> torch.Tensor:
    """Return the final hidden states [1, tokens, hidden] in what a body returns."""
    hidden = output[0] if isinstance(output, tuple) else output.last_hidden_state
    assert isinstance(hidden, torch.Tensor)
    return hidden


def _body(callees: list[_Callee], recorder: _Recorder) -> _Callee:
    """Return the one part of the model that mixes tokens."""
    mixing = [callee for callee in callees if callee.calls]
    if not mixing:
        raise NotServable("never calls transformers' attention interface, so its attention cannot be replaced")
    if len(mixing) > 1:
        raise NotServable("attends in more than one part of its forward pass")
    body = mixing[0]
    if recorder.calls and not takes_positions(body.module):
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
            window=mask_window(call, name, masks, max_context_len),
            logit_cap=arguments.get("softcap"),
            num_sinks=0 if sinks is None else int(sinks.numel()),
            latent=is_latent(call.module),
        )
    except (ValueError, TypeError) as err:
        raise NotServable(f"attends in {name} in a way that a layer's description cannot say: {err}") from err


def _check_modules(model: Any, modules: tuple[str, ...], states: tuple[StateModule, ...]) -> None:
    twice = next((name for name in modules if modules.count(name) > 1), None)
    if twice is not None:
        raise NotServable(f"attends in {twice} more than once in a forward pass")
    config = model.config.get_text_config()
    declared = getattr(config, "num_hidden_layers", None)
    known = {layer_name(name) or name for name in (*modules, *(module.name for module in states))}
    if states:  # then some layers may look at each token by itself, as the config says
        kinds = getattr(config, "layer_types", None) or ()
        known |= {str(place) for place, kind in enumerate(kinds) if kind in _TOKENWISE}
    if isinstance(declared, int) and declared != len(known):
        raise NotServable(
            f"attends or keeps a state in {len(known)} of its {declared} layers; the others would keep a state of "
            "another kind"
        )


def layer_name(module: str) -> str | None:
    """Return a module's name up to the first number in it, which is its layer's; None where there is none."""
    parts = module.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return None if number is None else ".".join(parts[: number + 1])


def _check_head(model: torch.nn.Module, found: Trace, hidden: torch.Tensor, recorder: _Recorder) -> None:
    """Check that the head works on hidden states alone, without running the body."""
    before = recorder.noted
    with _data_needed():
        logits = Head(model, found.body, found.body_output).logits(hidden[:3])
    if recorder.noted != before or logits.shape != (3, found.vocab_size):
        raise NotServable(f"computes no logits from the hidden states of {found.body} alone")
