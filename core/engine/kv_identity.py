"""The identity of KV: what a block of it depends on beside its tokens and their namespace."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pegboard.core.toolkit.cache.block_keys import FORMAT, framed, sha256
from pegboard.core.toolkit.model.weights_digest import weights_digest

if TYPE_CHECKING:
    from pegboard.core.interfaces.layers import LayerSpec
    from pegboard.core.interfaces.model_family import ModelContext

NOT_COUNTED = {"_name_or_path", "torch_dtype", "dtype", "transformers_version"}
"""Fields of a model's config that change no KV: where it came from, what wrote it, and how it is stored. In which dtype
it is computed counts by itself.
"""


def kv_identity(model: ModelContext, layers: Sequence[LayerSpec], *, numerics: Sequence[str] = ()) -> bytes:
    """Return 32 bytes that are equal only where KV of equal tokens is: of one model, with its weights, in one dtype,
    for the same `layers` (all that the pool keeps, in its order), computed in the same way. `numerics` are what the
    runner and the speculator say of that, in a fixed order.

    A copy of a model elsewhere has the same identity. Raises OSError where its weights cannot be read.
    """
    fields = [
        weights_digest(model.directory),
        _json(_counted(model.hf_config)),
        str(model.dtype).encode(),
        _json([dataclasses.asdict(layer) for layer in layers]),
        *(text.encode("utf-8", "surrogatepass") for text in numerics),
    ]
    return sha256(framed(FORMAT, *fields))


def _counted(value: object) -> object:
    """Return a config's value without what is not counted, at any depth."""
    if isinstance(value, Mapping):
        return {key: _counted(one) for key, one in value.items() if key not in NOT_COUNTED}
    return [_counted(one) for one in value] if isinstance(value, list | tuple) else value


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()
