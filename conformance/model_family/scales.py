"""The suite of ModelFamily: scales of 8-bit keys and values."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pegboard.conformance.model_family.base import ModelSuite
from pegboard.conformance.rig.model_references import context, prompts
from pegboard.conformance.rig.paged import PagedRun
from pegboard.conformance.suite import capability, lacks
from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.model_family import ModelFamily

_ATTENTION = re.compile(r"(?P<attention>.*\blayers\.(?P<layer>\d+)\.self_attn)\.k_proj\.weight")

FORMS: Mapping[str, tuple[str, str]] = {
    "of attention": ("{}.k_scale", "{}.v_scale"),
    "of its core": ("{}.attn.k_scale", "{}.attn.v_scale"),
    "of the projections": ("{}.k_proj.k_scale", "{}.v_proj.v_scale"),
    "as their outputs": ("{}.k_proj.output_scale", "{}.v_proj.output_scale"),
}
"""Under which names checkpoints keep the scales of K and of V of an attention."""

Spoil = Callable[[dict[str, torch.Tensor], str], object]


@dataclass(frozen=True)
class Scaled:
    """A family over a checkpoint with `scales`, and the same checkpoint without, `plain`. `name` is the tensor of the
    second layer's K scale.
    """

    family: ModelFamily
    scales: Mapping[int, tuple[float, float]]
    name: str
    plain: Path

    @property
    def error(self) -> str:
        """What it says of its scales when it is asked for them."""
        with pytest.raises(ModelError) as raised:
            self.family.kv_scales()
        return str(raised.value)


class ScaleTests(ModelSuite):
    """Checkpoints get scales under the names of the tools that make them."""

    def _scaled(
        self, factory: pytest.TempPathFactory, form: str = "of attention", spoil: Spoil | None = None
    ) -> Scaled:
        """Return the first architecture that is supported, with scales, of which `spoil` may change some. Skips where
        none has layers with projections of their own.
        """
        for architecture in self.architectures:
            plain = self._checkpoint(architecture, factory)
            if self.objection(context(plain)) is None:
                directory = Path(shutil.copytree(plain, factory.mktemp("scaled") / "copy"))
                scales, name = _add_scales(directory, FORMS[form], spoil)
                if scales:
                    return Scaled(self.build(context(directory)), scales, name, plain)
        pytest.skip("no architecture has projections of keys under a name that is known here")

    @capability("kv_scales")
    def test_none_where_there_are_none(self, architecture: str, checkpoint: Path) -> None:
        family: ModelFamily = self.build(context(checkpoint))
        assert dict(family.kv_scales()) == {}

    @lacks("kv_scales")
    def test_no_scales_are_read(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        """1 is for all layers, as the pool has it."""
        assert dict(self._scaled(tmp_path_factory).family.kv_scales()) == {}

    @capability("kv_scales")
    @pytest.mark.parametrize("form", FORMS)
    def test_scales_of_every_layer(self, form: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        found = self._scaled(tmp_path_factory, form)
        assert dict(found.family.kv_scales()) == found.scales
        assert set(found.scales) == {layer.layer_id for layer in found.family.spec.layers}

    @capability("kv_scales")
    def test_one_scale_for_both(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        """As older checkpoints have it: `kv_scale`."""

        def join(tensors: dict[str, torch.Tensor], name: str) -> None:
            for one in [one for one in tensors if one.endswith(".k_scale")]:
                tensors[f"{one.removesuffix('.k_scale')}.kv_scale"] = tensors.pop(one)
                del tensors[f"{one.removesuffix('.k_scale')}.v_scale"]

        found = self._scaled(tmp_path_factory, spoil=join)
        assert dict(found.family.kv_scales()) == {layer: (k, k) for layer, (k, _) in found.scales.items()}

    @capability("kv_scales")
    @pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf], ids=str)
    def test_wrong_scales_are_named(self, value: float, tmp_path_factory: pytest.TempPathFactory) -> None:
        def change(tensors: dict[str, torch.Tensor], name: str) -> None:
            tensors[name] = torch.tensor([value])

        found = self._scaled(tmp_path_factory, spoil=change)
        assert re.search(rf"model\.safetensors\b.*{re.escape(found.name)}\b", found.error)

    @capability("kv_scales")
    def test_a_missing_scale_is_named(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        """By its layer, and by the file that has others."""
        found = self._scaled(tmp_path_factory, spoil=lambda tensors, name: tensors.pop(name))
        assert re.search(r"model\.safetensors\b.*layer 1\b.*k_scale", found.error)

    @capability("kv_scales")
    def test_scales_of_heads_are_named(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        """One scale for a layer is all that a pool has."""

        def change(tensors: dict[str, torch.Tensor], name: str) -> None:
            tensors[name] = torch.ones(2)

        found = self._scaled(tmp_path_factory, spoil=change)
        assert re.search(rf"model\.safetensors\b.*{re.escape(found.name)}\b", found.error)

    @capability("kv_scales")
    def test_scales_are_not_in_the_way(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        """A network is loaded and computes as without them: KV here is not in 8 bits."""
        scaled = self._scaled(tmp_path_factory)
        prompt = prompts(scaled.plain)[2]
        found = PagedRun(scaled.family.load(), scaled.family.spec).step({0: prompt})[0]
        assert torch.equal(found, self._run(scaled.plain).step({0: prompt})[0])


def _add_scales(
    directory: Path, forms: tuple[str, str], spoil: Spoil | None
) -> tuple[dict[int, tuple[float, float]], str]:
    """Write scales beside the weights of a checkpoint; none where its layers have other names. Returns them, and the
    name of the second layer's K scale.
    """
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    found = [match for name in tensors if (match := _ATTENTION.fullmatch(name))]
    scales: dict[int, tuple[float, float]] = {}
    spoiled = ""
    for match in found:
        layer, attention = int(match["layer"]), match["attention"]
        scales[layer] = 0.25 + layer, 0.125 * (1 + layer)
        for form, value in zip(forms, scales[layer], strict=True):
            tensors[form.format(attention)] = torch.tensor([value], dtype=torch.bfloat16)
        if layer == 1:
            spoiled = forms[0].format(attention)
    if scales and spoil is not None:
        spoil(tensors, spoiled)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return scales, spoiled
