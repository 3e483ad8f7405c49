"""transformers' own config objects of parsed config.json files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class NotServable(Exception):
    """Why paged attention cannot serve the model; completes the sentence "X ...". `supports` hands the text on."""


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


def _type_of(hf_config: Mapping[str, object]) -> object:
    """Return the `model_type` that transformers' own AutoConfig takes: a Mistral that lists types of layers
    (Ministral-8B-Instruct-2410) is a Ministral.
    """
    model_type = hf_config.get("model_type")
    return "ministral" if model_type == "mistral" and "layer_types" in hf_config else model_type


CAUSAL, WITH_PICTURES = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"
"""What transformers calls its tables of model classes."""


def classes(table: str, model_type: object = None) -> set[str]:
    """Return the names of the classes in a table of transformers, of one `model_type` or of all."""
    from transformers.models.auto import modeling_auto

    rows: Mapping[str, str | tuple[str, ...]] = getattr(modeling_auto, table)
    entries = rows.values() if model_type is None else [rows[key] for key in (str(model_type),) if key in rows]
    return {name for entry in entries for name in ([entry] if isinstance(entry, str) else entry)}


def auto_class(hf_config: Mapping[str, object]) -> str:
    """Return the name of the class of transformers that makes the model of a config: that for causal language models,
    or for those that take pictures as well. Of Llama 4 the first makes the part that takes text.
    """
    model_type = hf_config.get("model_type")
    pictures = classes(WITH_PICTURES, model_type) and not classes(CAUSAL, model_type)
    return "AutoModelForImageTextToText" if pictures else "AutoModelForCausalLM"


def own_class(hf_config: Mapping[str, object], architecture: str) -> str:
    """Return the name of the class that the auto class of a causal language model would choose. It is
    `architecture`, except for a Mistral that is a Ministral.
    """
    found = classes(CAUSAL, _type_of(hf_config))
    return architecture if architecture in found or len(found) != 1 else found.pop()


def _config_reader(hf_config: Mapping[str, object]) -> Callable[[Mapping[str, object]], object]:
    """Return what makes a model's config of a mapping: by its type, or, where transformers does not know the type, by
    its architecture. Kimi K2 has a type of its own, and the architecture of DeepSeek-V3.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type, names = _type_of(hf_config), hf_config.get("architectures")
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
