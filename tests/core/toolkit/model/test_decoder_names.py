"""A decoder's tensors are found under every name that a checkpoint gives them, and what is not its own stays out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pegboard.core.interfaces.errors import ModelError
from pegboard.core.toolkit.model.decoder_names import DecoderNames
from pegboard.core.toolkit.model.decoder_spec import DecoderSpec
from pegboard.core.toolkit.model.weights import check_weights, load_weights

NAMES = ("embed_tokens.weight", "layers.0.mlp.up_proj.weight", "norm.weight")

LAYOUTS = {
    "plain": ("model.", "lm_head.", "visual."),
    "plain, new vision": ("model.", "lm_head.", "model.visual."),
    "nested": ("model.language_model.", "lm_head.", "model.visual."),
    "outer": ("language_model.model.", "language_model.lm_head.", "visual."),
    "outer with a plain head": ("language_model.model.", "lm_head.", "visual."),
}


def spec(architecture: str = "Qwen3VLForConditionalGeneration", *, tied: bool = False) -> DecoderSpec:
    sizes = {"hidden_size": 512, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = {**sizes, "num_key_value_heads": 4, "vocab_size": 10}
    return DecoderSpec.from_config({"architectures": [architecture], "tie_word_embeddings": tied, **text})


def buffers(*, tied: bool) -> dict[str, torch.Tensor]:
    names = [f"model.{name}" for name in NAMES] + ([] if tied else ["lm_head.weight"])
    return {name: torch.zeros(2) for name in names}


def save(directory: Path, layout: str) -> dict[str, torch.Tensor]:
    """Write a checkpoint of a model with a vision tower and a head. Returns its tensors by the decoder's names."""
    body, head, vision = LAYOUTS[layout]
    tensors = {f"model.{name}": torch.randn(2) for name in NAMES} | {"lm_head.weight": torch.randn(2)}
    stored = {body + name.removeprefix("model."): one for name, one in tensors.items() if name.startswith("model.")}
    stored |= {f"{vision}blocks.0.attn.qkv.weight": torch.ones(3), f"{head}weight": tensors["lm_head.weight"]}
    stored[f"{body}layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    for number, names in enumerate((sorted(stored)[::2], sorted(stored)[1::2])):
        save_file({name: stored[name] for name in names}, directory / f"part{number}.safetensors")
    return tensors


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_tower_loads_from_every_layout(layout: str, tied: bool, tmp_path: Path) -> None:
    expected = save(tmp_path, layout)
    names, found = DecoderNames.of(spec(tied=tied), tmp_path), buffers(tied=tied)
    load_weights(tmp_path, names.targets(found), ignore=names.ignores)
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_lacks_is_named_as_the_checkpoint_names_it(layout: str, tmp_path: Path) -> None:
    save(tmp_path, layout)
    names = DecoderNames.of(spec(), tmp_path)
    targets = names.targets({**buffers(tied=False), "model.layers.1.mlp.up_proj.weight": torch.zeros(2)})
    with pytest.raises(ModelError, match=rf"lacks {LAYOUTS[layout][0]}layers\.1\.mlp\.up_proj\.weight"):
        check_weights(tmp_path, targets, ignore=names.ignores)


def test_the_decoders_own_tensors_are_not_ignored(tmp_path: Path) -> None:
    save(tmp_path, "nested")
    names = DecoderNames.of(spec(tied=True), tmp_path)
    with pytest.raises(ModelError, match=r"model\.language_model\.norm\.weight \[2\] has no place"):
        check_weights(tmp_path, names.targets({"model.embed_tokens.weight": torch.zeros(2)}), ignore=names.ignores)


def test_a_text_model_has_its_plain_names_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, "nested")
    names = DecoderNames.of(spec("Qwen3ForCausalLM"), tmp_path / "is not looked at")
    assert set(names.targets(buffers(tied=False))) == set(buffers(tied=False))
    with pytest.raises(ModelError, match=r"model\.visual\.blocks.* has no place in this model"):
        check_weights(tmp_path, names.targets(buffers(tied=False)), ignore=names.ignores)
