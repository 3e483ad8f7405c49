"""The identity of KV: everything that a block depends on besides its tokens and their namespace."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pegboard.toolkit.cache.block_keys import FORMAT, framed, sha256
from pegboard.toolkit.model.hadamard import transforms
from pegboard.toolkit.model.weights_digest import weights_digest

if TYPE_CHECKING:
    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.layers import LayerSpec
    from pegboard.core.interfaces.model_family import ModelContext

NOT_COUNTED = {"_name_or_path", "torch_dtype", "dtype", "transformers_version"}
"""Fields of a model's config that change no KV: where it came from, what wrote it, and how it is stored. In which dtype
it is computed counts by itself.
"""


def kept_as(pool: KVPool, model: ModelContext) -> str:
    """Return how a pool keeps KV: "" in the model's type, else the type, which layers' keys are transformed, and scales
    that are not 1.
    """
    dtypes = {pool.keys(layer_id).dtype for layer_id in pool.layer_ids}
    if dtypes <= {model.dtype}:
        return ""
    scales = {layer_id: pool.scales(layer_id) for layer_id in pool.layer_ids}
    told = {layer_id: both for layer_id, both in scales.items() if both != (1.0, 1.0)}
    hadamard = [layer_id for layer_id in pool.layer_ids if transforms(pool, layer_id)]
    parts = [*sorted(map(str, dtypes))]
    parts += [f"Hadamard {_json(hadamard).decode()}"] if hadamard else []
    parts += [f"scaled {_json(told).decode()}"] if told else []
    return ", ".join(parts)


def kv_identity(
    model: ModelContext, layers: Sequence[LayerSpec], *, numerics: Sequence[str] = (), kept: str = ""
) -> bytes:
    """Return 32 bytes that are equal only where KV of equal tokens is: of one model, with its weights, in one dtype,
    for the same `layers` (all that the pool keeps, in its order), computed in the same way. `numerics` are what the
    runner and device parts say of that, in a fixed order; `kept` is what `kept_as` says.

    A copy of a model elsewhere has the same identity. Raises OSError where its weights cannot be read.
    """
    return sha256(framed(*_fields(model, layers, numerics, kept).values()))


def described_kv(
    model: ModelContext, layers: Sequence[LayerSpec], *, numerics: Sequence[str] = (), kept: str = ""
) -> dict[str, str]:
    """Return what an identity is made of, by name: short texts as they are, of others the first hexadecimal digits of
    their digest. Two identities differ where one of these does. The type of KV is told in any case.
    """
    told = {name: _short(value) for name, value in _fields(model, layers, numerics, kept).items()}
    if told.get("kept as", kept) != kept:
        told["kept as"] = f"{kept.partition(',')[0]} ({told['kept as']})"
    return told


def _fields(model: ModelContext, layers: Sequence[LayerSpec], numerics: Sequence[str], kept: str) -> dict[str, bytes]:
    # Nothing where KV is kept as it is computed: what was stored before there was another way is still found.
    further = {"kept as": kept.encode()} if kept else {}
    return {
        "format": FORMAT,
        "weights": weights_digest(model.directory),
        "config": _json(_counted(model.hf_config)),
        "dtype": str(model.dtype).encode(),
        "layers": _json([_described(layer) for layer in layers]),
        **{f"numerics {place}": text.encode("utf-8", "surrogatepass") for place, text in enumerate(numerics)},
        **further,
    }


def _described(layer: LayerSpec) -> dict[str, object]:
    """Return a layer's fields. `latent` only where it is true: what was stored before it was a field is still found."""
    return {name: value for name, value in dataclasses.asdict(layer).items() if name != "latent" or value}


def _short(value: bytes) -> str:
    plain = len(value) <= 64 and value.isascii() and value.decode("ascii").isprintable()
    return value.decode("ascii") if plain else f"sha256 {sha256(value).hex()[:16]}"


def _counted(value: object) -> object:
    """Return a config's value without what is not counted, at any depth."""
    if isinstance(value, Mapping):
        return {key: _counted(one) for key, one in value.items() if key not in NOT_COUNTED}
    return [_counted(one) for one in value] if isinstance(value, list | tuple) else value


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()
