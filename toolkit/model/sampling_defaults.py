"""Default sampling parameters: the model's, from generation_config.json, and the config's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from pegboard.core.interfaces.errors import InvalidRequest, ModelError
from pegboard.core.interfaces.sampling import SAMPLING_DEFAULTS, SamplingParams
from pegboard.toolkit.model.hf_files import read_json_object

logger = logging.getLogger(__name__)

_OF_DRAWING = frozenset({"temperature", "top_p", "top_k", "min_p"})
FILE = "generation_config.json"


def sampling_defaults(setting: str | Mapping[str, float], directory: Path) -> dict[str, float]:
    """Return the defaults of the config's `sampling_defaults` for the model in `directory`, by parameter.

    `model` is what its generation_config.json says, `none` nothing; values are laid over the model's. Raises ModelError
    for a file with values that no sampler can honour.
    """
    if setting == "none":
        return {}
    own = {} if isinstance(setting, str) else checked(setting)
    of_model = _of_model(directory, own)
    found = {name: own.get(name, of_model.get(name)) for name in SAMPLING_DEFAULTS}
    defaults = {name: value for name, value in found.items() if value is not None}
    for source, values in ((FILE, of_model), ("the config", own)):
        if values:
            told = ", ".join(f"{name} {value:g}" for name, value in values.items())
            logger.info("sampling defaults of %s: %s", source, told)
    return defaults


def checked(values: Mapping[str, object]) -> dict[str, float]:
    """Return values by parameter, in their types. Raises InvalidRequest, naming the parameter."""
    params = SamplingParams.of(values)
    params.validate_numbers()
    return {name: getattr(params, name) for name in values}


def _of_model(directory: Path, instead: Mapping[str, float]) -> dict[str, float]:
    """Return the file's values, without those that others stand for. ``do_sample: false`` is greedy, and what the file
    says of drawing is then not meant.
    """
    file = read_json_object(directory / FILE)
    greedy = file.get("do_sample") is False
    values: dict[str, object] = {"temperature": 0.0} if greedy else {}
    for name in SAMPLING_DEFAULTS:
        if file.get(name) is not None and not (greedy and name in _OF_DRAWING):
            values[name] = file[name]
    try:
        return checked({name: value for name, value in values.items() if name not in instead})
    except InvalidRequest as error:
        raise ModelError(
            f"{directory / FILE}: {error.message}; correct it, or set sampling_defaults to none or, for this "
            "parameter, to a value of your own"
        ) from None
