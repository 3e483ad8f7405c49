"""Settings of 8-bit keys and values in config.json. No torch."""

from __future__ import annotations

from collections.abc import Mapping


def kept_in_eight_bits(hf_config: Mapping[str, object]) -> bool:
    """Return whether a checkpoint was made for keys and values in float8_e4m3: so says `kv_cache_scheme`, of
    compressed-tensors and newer ModelOpt, or `kv_cache_quant_algo`, of older ModelOpt.
    """
    text = hf_config.get("text_config")
    parts = (hf_config, text if isinstance(text, Mapping) else {})
    return any(_says_so(part.get("quantization_config")) for part in parts)


def weights_are_plain(quantisation: object) -> bool:
    """Return whether a config's `quantization_config` is about keys and values alone."""
    if not isinstance(quantisation, Mapping) or not _says_so(quantisation):
        return False
    return not (quantisation.get("config_groups") or quantisation.get("quant_algo"))


def _says_so(quantisation: object) -> bool:
    if not isinstance(quantisation, Mapping):
        return False
    if str(quantisation.get("kv_cache_quant_algo", "")).upper() == "FP8":
        return True
    scheme = quantisation.get("kv_cache_scheme")
    if not isinstance(scheme, Mapping):
        return False
    return scheme.get("num_bits") == 8 and scheme.get("type") == "float" and not scheme.get("dynamic")


def quantization_of(hf_config: Mapping[str, object]) -> Mapping[str, object] | None:
    """Return what a config.json says of quantised weights; None for plain ones."""
    text = hf_config.get("text_config")
    for part in (hf_config, text if isinstance(text, Mapping) else {}):
        given = part.get("quantization_config")
        if isinstance(given, Mapping) and given and not weights_are_plain(given):
            return given
    return None
