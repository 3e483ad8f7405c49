"""Merging layers into one tree, and remembering which layer set what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pegboard.core.config.shape import CORE, Shape
from pegboard.core.config.sources import DEFAULT_PRESET, Layer, read_preset
from pegboard.toolkit.text.dotted_trees import value_at


def default_layers(shape: Shape) -> list[Layer]:
    """Return what all configs start from: what plugins say of their contracts, and the default preset."""
    return [*(Layer(DEFAULT_PRESET, tree) for tree in shape.defaults()), read_preset(DEFAULT_PRESET)]


class Merged:
    """The merged tree and, per dotted path of a value, the origin to cite. `shape` says what is a section."""

    def __init__(self, layers: Iterable[Layer] = (), shape: Shape = CORE) -> None:
        self.shape = shape
        self.data: dict[str, object] = {}
        self.origins: dict[str, str] = {}
        for layer in layers:
            self._merge(self.data, layer.data, layer, "")

    def get(self, path: str, default: object = None) -> object:
        return value_at(self.data, path, default)

    def origin(self, path: str) -> str:
        """Return the origin of the value at `path`, of the nearest section or list around it, or of the first key of
        the section that it is; "" where nothing has set it.
        """
        around = path
        while around:
            if around in self.origins:
                return self.origins[around]
            around = around[: max(around.rfind("."), around.rfind("["), 0)]
        return next((origin for known, origin in self.origins.items() if known.startswith(f"{path}.")), "")

    def _merge(self, target: dict[str, object], source: Mapping[str, object], layer: Layer, path: str) -> None:
        """Sections merge key by key, everything else is replaced. A new `use` drops the former provider's options."""
        if path in self.shape.uses and "use" in source and source["use"] != target.get("use", source["use"]):
            for key in [key for key in target if key not in self.shape.core_keys(path)]:
                self._drop(target, key, f"{path}.{key}")
        for key, value in source.items():
            child = f"{path}.{key}" if path else key
            if value is None and self.shape.is_section(child):
                value = {}
            if isinstance(value, Mapping):
                section = target.get(key)
                if not isinstance(section, dict):
                    self._drop(target, key, child)
                    section = target[key] = {}
                self._merge(section, value, layer, child)
                if not value:
                    self.origins.setdefault(child, layer.origin(child))
            else:
                self._drop(target, key, child)
                target[key] = value
                self._note(value, layer, child)

    def _note(self, value: object, layer: Layer, path: str) -> None:
        self.origins[path] = layer.origin(path)
        if isinstance(value, list):
            for index in range(len(value)):
                self.origins[f"{path}[{index}]"] = layer.origins.get(f"{path}[{index}]", self.origins[path])

    def _drop(self, target: dict[str, object], key: str, path: str) -> None:
        target.pop(key, None)
        for known in [one for one in self.origins if one == path or one.startswith((f"{path}.", f"{path}["))]:
            del self.origins[known]
