"""What a vision tower is made of, read from config.json. No torch.

The defaults for keys that a config leaves out are those of transformers' config classes, since that is how such a file
was meant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pegboard.core.interfaces.errors import ModelError

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
"""Values of `hidden_act` that the towers know; a plain MLP knows "quick_gelu" as well."""

# Far above any model's: Python objects and memory are made of these before weights can tell that they are wrong.
_LAYERS, _WIDTH, _SMALL = 1024, 2**24, 2**12


@dataclass(frozen=True, slots=True)
class _Family:
    """How an architecture's tower differs from the others, and its defaults. `width_key` and `out_key` name the
    tower's own size and that of its states.
    """

    depth: int
    width: int
    act: str
    intermediate: int | None = None
    patch: int = 14
    gated: bool = False
    width_key: str = "hidden_size"
    out_key: str = "out_hidden_size"
    patch_bias: bool = False
    windows: bool = False
    grid: bool = False


_QWEN2 = _Family(depth=32, width=1280, act="quick_gelu", width_key="embed_dim", out_key="hidden_size")
_QWEN25 = _Family(depth=32, width=3584, act="silu", intermediate=3420, gated=True, windows=True)
_QWEN3 = _Family(
    depth=27,
    width=1152,
    act="gelu_pytorch_tanh",
    intermediate=4304,
    patch=16,
    patch_bias=True,
    grid=True,
)

_FAMILIES: Mapping[str, _Family] = {
    "Qwen2VLForConditionalGeneration": _QWEN2,
    "Qwen2_5_VLForConditionalGeneration": _QWEN25,
    "Qwen3VLForConditionalGeneration": _QWEN3,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3,
}

ARCHITECTURES = tuple(_FAMILIES)
"""The entries of `architectures` whose towers can be read."""


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """A vision transformer over patches with 2-D rotary positions, whose outputs are merged `merge` by `merge`.

    `gated`: RMS norms and a gated MLP (Qwen2.5-VL), else LayerNorms and a plain one. `window` is the side of attention
    windows in merged blocks, for all layers that are not in `full_layers`; None: all attend to the whole picture.
    `grid_rows` counts the learned positions, 0 where there are none. `deep` has, per level, the layer whose output it
    is, lowest first, with the number of its merger.
    """

    depth: int
    width: int
    intermediate: int
    heads: int
    out_size: int
    patch: int
    temporal: int
    merge: int
    act: str
    rope_theta: float
    gated: bool = False
    patch_bias: bool = False
    window: int | None = None
    full_layers: frozenset[int] = frozenset()
    grid_rows: int = 0
    deep: tuple[tuple[int, int], ...] = ()

    @property
    def head_dim(self) -> int:
        """Size of an attention head."""
        return self.width // self.heads

    @property
    def grid_side(self) -> int:
        """Side of the square of learned positions."""
        return math.isqrt(self.grid_rows)

    @property
    def merged_width(self) -> int:
        """Size of the merge by merge patches that make a token."""
        return self.width * self.merge**2

    @property
    def patch_values(self) -> int:
        """Numbers in a patch: channels, frames, rows, columns."""
        return 3 * self.temporal * self.patch**2

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> VisionSpec:
        """Read a parsed config.json. Raises ModelError naming the key and its value where it is not understood."""
        family = _family(config)
        vision = _Values(_vision_config(config))
        width = vision.size(family.width_key, family.width, _WIDTH)
        patch, merge = vision.size("patch_size", family.patch, _SMALL), vision.size("spatial_merge_size", 2, _SMALL)
        depth = vision.size("depth", family.depth, _LAYERS)
        grid_rows = vision.size("num_position_embeddings", 2304, _WIDTH) if family.grid else 0
        spec = cls(
            depth=depth,
            width=width,
            intermediate=_intermediate(vision, family, width),
            heads=_heads(vision, width),
            out_size=vision.size(family.out_key, 3584, _WIDTH),
            patch=patch,
            temporal=vision.size("temporal_patch_size", 2, _SMALL),
            merge=merge,
            act=_activation(vision, family),
            rope_theta=_rope_theta(vision),
            gated=family.gated,
            patch_bias=family.patch_bias,
            window=_window(vision, merge * patch) if family.windows else None,
            full_layers=frozenset(vision.layers("fullatt_block_indexes", (7, 15, 23, 31)) if family.windows else ()),
            grid_rows=grid_rows,
            deep=_deep(vision, depth) if family.grid else (),
        )
        _check_sizes(vision, config, spec)
        return spec


class _Values:
    """The values of vision_config, checked one by one."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def get(self, key: str) -> object:
        return self._values.get(key)

    def size(self, key: str, default: int, at_most: int) -> int:
        """Return the positive integer of a key, `default` where it is absent or null."""
        value = default if self.get(key) is None else self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= at_most:
            raise bad_value(key, value, f"a positive integer up to {at_most}")
        return value

    def layers(self, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """Return the list of layer numbers of a key."""
        value = default if self.get(key) is None else self.get(key)
        if not isinstance(value, list | tuple) or not all(type(one) is int and one >= 0 for one in value):
            raise bad_value(key, value, "a list of layer numbers")
        return tuple(value)


def bad_value(key: str, value: object, wanted: str, file: str = "config.json: vision_config") -> ModelError:
    """Return the error that says what a key must be and what it is."""
    return ModelError(f"{file}.{key} must be {wanted}, found {value!r:.80}")


def _family(config: Mapping[str, object]) -> _Family:
    names = config.get("architectures")
    if isinstance(names, list):
        for name in names:
            if isinstance(name, str) and name in _FAMILIES:
                return _FAMILIES[name]
    raise ModelError(f"architecture {names!r:.80} is not one of {', '.join(ARCHITECTURES)}")


def _vision_config(config: Mapping[str, object]) -> Mapping[str, object]:
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise ModelError(f"config.json: vision_config must be an object, found {vision!r:.80}")
    return vision


def _intermediate(vision: _Values, family: _Family, width: int) -> int:
    if family.intermediate is not None:
        return vision.size("intermediate_size", family.intermediate, _WIDTH)
    ratio = 4 if vision.get("mlp_ratio") is None else vision.get("mlp_ratio")
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < width * ratio < _WIDTH:
        raise bad_value("mlp_ratio", ratio, "a positive number")
    return int(width * ratio)


def _heads(vision: _Values, width: int) -> int:
    heads = vision.size("num_heads", 16, 2**16)
    if width % heads or width // heads % 4:
        raise ModelError(
            f"config.json: vision_config: {width} numbers do not make {heads} heads of a multiple of 4 numbers each, "
            f"which rotary positions on two axes need"
        )
    return heads


def _activation(vision: _Values, family: _Family) -> str:
    name = vision.get("hidden_act") or family.act
    known = ACTIVATIONS if family.gated else ("quick_gelu", *ACTIVATIONS)
    if not isinstance(name, str) or name not in known:
        raise bad_value("hidden_act", name, f"one of {', '.join(known)}")
    return name


def _rope_theta(vision: _Values) -> float:
    rope = vision.get("rope_parameters")
    if rope is None:
        return 10000.0
    kind = rope.get("rope_type", "axial") if isinstance(rope, Mapping) else None
    if not isinstance(rope, Mapping) or kind not in ("axial", "default"):
        raise bad_value("rope_parameters", rope, "an object with rope_type 'axial'")
    theta = rope.get("rope_theta", 10000.0)
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < 1e30:
        raise bad_value("rope_parameters.rope_theta", theta, "a positive number")
    return float(theta)


def _window(vision: _Values, block: int) -> int:
    """Return the side of a window in merged blocks of `block` pixels."""
    pixels = vision.size("window_size", 112, _WIDTH)
    if pixels < block:
        raise bad_value("window_size", pixels, f"at least the {block} pixels of a merged block")
    return pixels // block


def _deep(vision: _Values, depth: int) -> tuple[tuple[int, int], ...]:
    """Return each deepstack layer with the number of its merger, lowest layer first, as transformers runs them."""
    layers = vision.layers("deepstack_visual_indexes", (8, 16, 24))
    if len(set(layers)) != len(layers) or any(layer >= depth for layer in layers):
        raise bad_value("deepstack_visual_indexes", layers, f"different layers below depth {depth}")
    return tuple(sorted((layer, number) for number, layer in enumerate(layers)))


def _check_sizes(vision: _Values, config: Mapping[str, object], spec: VisionSpec) -> None:
    """Raise ModelError for pixels that have other than three channels, and states of another size than the text's."""
    for key in ("in_channels", "in_chans"):
        if vision.get(key) not in (None, 3):
            raise bad_value(key, vision.get(key), "3, for red, green and blue")
    text = config.get("text_config")
    hidden = (text if isinstance(text, Mapping) else config).get("hidden_size")
    if hidden is not None and hidden != spec.out_size:
        raise ModelError(
            f"config.json: vision_config makes states of {spec.out_size} numbers, but the text's hidden_size is "
            f"{hidden!r:.80}"
        )
