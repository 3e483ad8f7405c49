"""What PEFT's adapter_config.json says of an adapter, without peft."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from pegboard.core.interfaces.errors import ModelError
from pegboard.toolkit.model.hf_files import read_json_object

CONFIG = "adapter_config.json"

_UNSUPPORTED = (
    ("use_dora", "DoRA"),
    ("modules_to_save", "whole modules beside the adapter (modules_to_save)"),
    ("trainable_token_indices", "trained embeddings of tokens (trainable_token_indices)"),
    ("target_parameters", "adapters on parameters (target_parameters)"),
    ("lora_bias", "biases (lora_bias)"),
    ("use_qalora", "QALoRA"),
    ("use_bdlora", "block-diagonal LoRA"),
    ("alora_invocation_tokens", "activated LoRA (alora_invocation_tokens)"),
    ("layer_replication", "replicated layers (layer_replication)"),
    ("arrow_config", "routed adapters (arrow_config)"),
    ("monteclora_config", "MonteCLoRA"),
    ("kasa_config", "KaSA"),
    ("velora_config", "VeLoRA"),
)
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that subtract from the base model's weights: what was trained fits the changed ones only."""

Names = str | list[str] | None
Rank = Annotated[int, msgspec.Meta(ge=1)]
T = TypeVar("T", int, float)


class PeftConfig(msgspec.Struct, frozen=True):
    """The fields that count of those that peft writes."""

    r: Rank = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    target_modules: Names = None
    exclude_modules: Names = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: Names = None
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, float] | None = None

    def rank(self, module: str) -> int:
        """Return the rank for a module."""
        return _of_pattern(self.rank_pattern or {}, module, self.r)

    def scale(self, module: str) -> float:
        """Return what b @ a is multiplied by: alpha / r, or alpha / sqrt(r) (Kalajdzievski 2023)."""
        rank = self.rank(module)
        return _of_pattern(self.alpha_pattern or {}, module, self.lora_alpha) / (
            math.sqrt(rank) if self.use_rslora else rank
        )

    def targets(self, module: str) -> bool:
        """Return whether the adapter is about a linear layer, as peft decides it."""
        if _named(self.exclude_modules, module):
            return False
        if self.target_modules == "all-linear":
            return True
        return _named(self.target_modules, module) and (
            isinstance(self.target_modules, str) or module in (self.target_modules or ()) or self._in_layers(module)
        )

    def _in_layers(self, module: str) -> bool:
        wanted = self.layers_to_transform
        if wanted is None or wanted == []:
            return True
        patterns = [self.layers_pattern] if isinstance(self.layers_pattern, str) else self.layers_pattern
        forms = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in patterns or ()] or [r".*?\.[^.]*\.(\d+)\."]
        found = next((match for form in forms if (match := re.match(form, module))), None)
        return found is not None and int(found[1]) in ([wanted] if isinstance(wanted, int) else wanted)


def _named(names: Names, module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names or ())


def _of_pattern(pattern: Mapping[str, T], module: str, otherwise: T) -> T:
    """Return the value of the first key that matches the end of a module's name, as peft does."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), otherwise)


def read_config(directory: Path) -> PeftConfig:
    """Return what the config says. Raises ModelError for what is not an adapter of PEFT, or not honoured here."""
    file = directory / CONFIG
    data = read_json_object(file)
    if not data:
        raise ModelError(f"{directory} has no {CONFIG}: it is not an adapter in PEFT's format")
    method = data.get("peft_type")
    if method != "LORA":
        raise ModelError(f"{file}: the method {method!r} is not supported, only LORA")
    for name, what in _UNSUPPORTED:
        if data.get(name):
            raise ModelError(f"{file}: {what} is not supported")
    _refuse_initialisation(file, data)
    try:
        config = msgspec.convert({key: value for key, value in data.items() if value is not None}, PeftConfig)
        _check_patterns(config)
    except (msgspec.ValidationError, re.error) as error:
        raise ModelError(f"{file}: {error}") from None
    if config.bias != "none":
        raise ModelError(f"{file}: biases (bias: {config.bias}) are not supported")
    return config


def _refuse_initialisation(file: Path, data: Mapping[str, object]) -> None:
    how = data.get("init_lora_weights")
    if isinstance(how, str) and how.lower().startswith(_CHANGE_THE_BASE):
        raise ModelError(
            f"{file}: an adapter initialised by {how} fits changed weights of the base model; convert it with "
            "path_initial_model_for_weight_conversion of peft's save_pretrained"
        )


def _check_patterns(config: PeftConfig) -> None:
    """Raise re.error for what is not a regular expression."""
    texts: list[str] = [*(config.rank_pattern or ()), *(config.alpha_pattern or ())]
    for names in (config.target_modules, config.exclude_modules):
        texts += [names] if isinstance(names, str) else []
    patterns = config.layers_pattern
    texts += [patterns] if isinstance(patterns, str) else patterns or []
    for text in texts:
        re.compile(text)


@dataclass(frozen=True, slots=True)
class Pair:
    """The two tensors of a module, by their names in the file."""

    module: str
    a: str
    b: str


_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")


def pairs_of(file: Path, names: Sequence[str]) -> list[Pair]:
    """Return the pairs that tensors of these names make. Raises ModelError for half of one, and for what is not one."""
    halves: dict[str, dict[str, str]] = {}
    for name in names:
        found = _TENSOR.fullmatch(name.removeprefix("base_model.model."))
        if found is None:
            raise ModelError(f"{file}: the tensor {name} is not supported; lora_A and lora_B of linear layers are")
        halves.setdefault(found["module"], {})[found["half"]] = name
    for module, both in halves.items():
        if len(both) < 2:
            (half,) = both.values()
            raise ModelError(f"{file}: {half} is half of a pair; the other half of {module} is missing")
    return [Pair(module, both["A"], both["B"]) for module, both in sorted(halves.items())]
