"""A decoder's tensors are found under every name that a checkpoint gives them, and what is not its own stays out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pegboard.core.interfaces.errors import ModelError
from pegboard.toolkit.model.decoder_names import DecoderNames
from pegboard.toolkit.model.decoder_ranks import sectioned, stored_bytes
from pegboard.toolkit.model.decoder_spec import DecoderSpec
from pegboard.toolkit.model.sections import Sections
from pegboard.toolkit.model.weights import check_weights, load_weights

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


SHAPES = {"wide": (2, 64, 48), "square up": (2, 64, 32), "square down": (2, 48, 48)}
"""Experts, hidden size and intermediate size."""


def moe_spec(architecture: str, hidden: int, inter: int) -> DecoderSpec:
    sizes = {"hidden_size": hidden, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 10, "moe_intermediate_size": inter}
    return DecoderSpec.from_config(
        {"architectures": [architecture], "num_experts": 2, "num_experts_per_tok": 1, **text}
    )


def save_experts(file: Path, layout: str, name: str, gate_up: torch.Tensor, down: torch.Tensor) -> None:
    stored = {f"{name}.gate_up_proj": gate_up, f"{name}.down_proj": down}
    if layout == "turned":
        stored = {key: one.transpose(1, 2).contiguous() for key, one in stored.items()}
    if layout == "single":
        inter = down.shape[2]
        stored = {f"{name}.{e}.gate_proj.weight": one[:inter].clone() for e, one in enumerate(gate_up)}
        stored |= {f"{name}.{e}.up_proj.weight": one[inter:].clone() for e, one in enumerate(gate_up)}
        stored |= {f"{name}.{e}.down_proj.weight": one.clone() for e, one in enumerate(down)}
    save_file(stored, file)


@pytest.mark.parametrize("layout", ["together", "turned", "single"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration"])
def test_experts_load_from_every_layout(architecture: str, shape: str, layout: str, tmp_path: Path) -> None:
    """Also where one of the two matrices is square, so that the other has to say which way round both are."""
    experts, hidden, inter = SHAPES[shape]
    gate_up, down = torch.randn(experts, 2 * inter, hidden), torch.randn(experts, hidden, inter)
    body = "model." if architecture == "Qwen3MoeForCausalLM" else "model.language_model."
    save_experts(tmp_path / "model.safetensors", layout, f"{body}layers.0.mlp.experts", gate_up, down)
    names = DecoderNames.of(moe_spec(architecture, hidden, inter), tmp_path)
    found = {
        "model.layers.0.mlp.experts.gate_up_proj": torch.zeros(experts, 2 * inter, hidden),
        "model.layers.0.mlp.experts.down_proj": torch.zeros(experts, hidden, inter),
    }
    load_weights(tmp_path, names.targets(found), ignore=names.ignores)
    assert torch.equal(found["model.layers.0.mlp.experts.gate_up_proj"], gate_up)
    assert torch.equal(found["model.layers.0.mlp.experts.down_proj"], down)


def test_an_expert_that_lacks_is_named(tmp_path: Path) -> None:
    save_experts(
        tmp_path / "model.safetensors", "single", "model.layers.0.mlp.experts", torch.ones(2, 6, 4), torch.ones(2, 4, 3)
    )
    names = DecoderNames.of(moe_spec("Qwen3MoeForCausalLM", 4, 3), tmp_path)
    gate_up, down = torch.zeros(3, 6, 4), torch.zeros(3, 4, 3)
    name = "model.layers.0.mlp.experts"
    targets = names.targets({f"{name}.gate_up_proj": gate_up, f"{name}.down_proj": down})
    with pytest.raises(ModelError, match=r"lacks model\.layers\.0\.mlp\.experts\.2\.gate_proj\.weight \[3, 4\]"):
        check_weights(tmp_path, targets, ignore=names.ignores)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_tensor_is_for_one_section(layout: str, tmp_path: Path) -> None:
    """Embeddings and head are the first one's, the final norm the last one's; what is of no section stays unknown."""
    save(tmp_path, layout)
    names = DecoderNames.of(spec(), tmp_path)
    tensors = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
    tensors += [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1, 2, 10)]
    sections = (range(2), range(2, 3), range(3, 11))
    kept = [[name for name in tensors if not names.elsewhere(names.stored(name), one, 11)] for one in sections]
    assert kept == [[*tensors[:2], *tensors[3:5]], [tensors[5]], [tensors[2], tensors[6]]]
    for unknown in ("model.layers.11.mlp.up_proj.weight", "model.layers.x.weight", "model.more.weight"):
        assert not names.elsewhere(names.stored(unknown), range(2), 11)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_are_divided_by_what_is_stored(layout: str, tmp_path: Path) -> None:
    """Two numbers of float32 each in a layer, the embeddings and the head; nothing else counts."""
    save(tmp_path, layout)
    assert stored_bytes(spec(), tmp_path) == ([8 + 16], 8 + 8)
    assert stored_bytes(spec(tied=True), tmp_path) == ([8 + 16], 8)
    whole = spec()
    assert sectioned(whole, Sections(), tmp_path) is whole
    assert sectioned(whole, Sections(1, 0, [1]), None).section is None
