"""What configs say, and heads that do not fit: refused by file, key, tensor and shape before a request is taken."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from pegboard.conformance.checkpoints import tiny_checkpoint, write_tiny_tokenizer
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.errors import ConfigError, ModelError, PluginError
from pegboard.core.interfaces.layers import LayerSpec, ModelSpec
from pegboard.core.interfaces.model_family import ModelContext
from pegboard.plugins.spec_eagle.config import read_draft
from pegboard.plugins.spec_eagle.options import EagleOptions
from pegboard.plugins.spec_eagle.speculator import EagleSpeculator
from pegboard.plugins.speculation.api import SpeculatorContext
from tests.plugins.spec_eagle.heads import HEADS_BY_NAME, HIDDEN, VOCAB, Head

DEEP = ModelSpec("model", VOCAB, HIDDEN, 4096, tuple(LayerSpec(i, 4, 2, 16, 16, 0.25) for i in range(32)), ())

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("config", "taps"),
    [
        ({}, (2, 16, 29)),
        ({"eagle_config": {}}, (2, 16, 29)),
        ({"eagle_config": {IDS: [1, 15, 28]}}, (2, 16, 29)),
        ({"eagle_config": {IDS: [7, 8]}}, (8, 9)),
        ({IDS: [2, 16, 29]}, (2, 16, 29)),
        ({IDS: [1, 15, 28]}, (2, 16, 29)),
        ({IDS: [0, 32]}, (0, 32)),
    ],
)
def test_which_states_are_read(config: Mapping[str, Any], taps: tuple[int, ...], tmp_path: Path) -> None:
    """SGLang's count of outputs, vLLM's of inputs, and what both do without."""
    found = read_draft(Head(config=config).write(tmp_path), DEEP)
    assert found.taps == taps


def test_taps_may_be_told(tmp_path: Path) -> None:
    assert read_draft(Head().write(tmp_path), DEEP, (4, 5, 6)).taps == (4, 5, 6)


def test_a_head_for_media_loads(tmp_path: Path) -> None:
    """Its rope has a position per axis, which are equal in text."""
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "target_model_type": "qwen2_5_vl"}
    found = read_draft(Head(config=rope).write(tmp_path), DEEP)
    assert found.decoder.rope == read_draft(Head().write(tmp_path / "plain"), DEEP).decoder.rope


def test_facts_of_an_eagle_head(tmp_path: Path) -> None:
    found = read_draft(HEADS_BY_NAME["eagle"].write(tmp_path), DEEP)
    assert (found.taps, found.vocab_size, found.eagle3) == ((33,), None, False)


BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM is none of LlamaForCausalLMEagle,"),
    "no architecture": ({"architectures": None}, "architecture none is none of"),
    "vocabulary": ({"vocab_size": 321}, "vocab_size 321 is not the model's, 320"),
    "hidden size": ({"hidden_size": 128}, "hidden_size 128 is not the model's, 64: the head is for another model"),
    "target's": ({"target_hidden_size": 32}, "target_hidden_size 32 is not the model's, 64"),
    "layers": ({"num_hidden_layers": 2}, "num_hidden_layers 2: heads of one layer are supported"),
    "draft vocabulary": ({"draft_vocab_size": 400}, "draft_vocab_size 400 is larger than the model's vocabulary, 320"),
    "no number": ({"draft_vocab_size": "many"}, "draft_vocab_size must be a positive integer, found 'many'"),
    "states": ({IDS: [2, 99]}, "the states [2, 99] are not all of a model of 3 layers"),
    "list": ({IDS: "2, 3"}, "must be a list of layers"),
    "one state": ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is off"),
    "model_type": ({"model_type": "mamba"}, "model_type 'mamba' is none of llama, qwen3"),
    "rope": ({"rope_scaling": {"rope_type": "odd"}}, "rope type 'odd' is not supported"),
}

BAD_TENSORS: dict[str, tuple[Head, str]] = {
    "missing": (Head(less=("fc.weight",)), "lacks fc.weight [64, 192]"),
    "shape": (Head(more={"fc.weight": (64, 128)}), "fc.weight has shape [64, 128], the config asks for [64, 192]"),
    "stranger": (Head(more={"midlayer.self_attn.sinks": (4,)}), "midlayer.self_attn.sinks [4] has no place"),
    "no head": (Head(less=("lm_head.weight",)), "lacks lm_head.weight [96, 64]"),
    "no ids": (Head(less=("d2t",)), "lacks d2t [96]"),
    "no embeddings": (replace(HEADS_BY_NAME["smaller"], more={}), "lacks embed_tokens.weight, which a head of another"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("models"), "llama")


def start(model: Path, directory: str | Path, **more: Any) -> None:
    config = {
        "model": {"path": str(model), "dtype": "float32"},
        "runner": {"use": "layered"},
        "memory": {"max_total_tokens": 256},
        "log_level": "error",
        "speculation": {"use": "eagle", "draft": str(directory), **more.pop("speculation", {})},
    }
    with Engine.from_config({**config, **more}):
        pass


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_configs(name: str, model: Path, tmp_path: Path) -> None:
    change, message = BAD_CONFIGS[name]
    with pytest.raises((ConfigError, PluginError)) as caught:
        start(model, Head(config=change).write(tmp_path))
    assert message in str(caught.value)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_bad_tensors(name: str, model: Path, tmp_path: Path) -> None:
    head, message = BAD_TENSORS[name]
    with pytest.raises(ModelError) as caught:
        start(model, head.write(tmp_path))
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors["d2t"].add_(300), "outside the vocabulary of 320"),
        (lambda tensors: tensors["d2t"].copy_(-torch.arange(96)), "leads to the same id from several places"),
        (lambda tensors: tensors["t2d"].logical_not_(), "t2d [320] and d2t [96] do not agree"),
    ],
)
def test_bad_vocabularies(change: Any, message: str, model: Path, tmp_path: Path) -> None:
    file = Head().write(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(ModelError) as caught:
        start(model, tmp_path)
    assert message in str(caught.value)


def test_more_children_than_the_head_has_words(model: Path, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, PluginError), match="topk 9: the head can draft 8 tokens"):
        start(model, Head(draft_vocab=8).write(tmp_path), speculation={"topk": 9})


@pytest.mark.parametrize(
    ("head", "taps", "message"),
    [
        ("eagle3", [1, 9], "speculation.taps: the states [1, 9] are not all of a model of 3 layers"),
        ("eagle", [1], "speculation.taps is for EAGLE-3"),
        ("eagle3", [], "taps"),
    ],
)
def test_bad_taps(head: str, taps: list[int], message: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, PluginError)) as caught:
        start(model, HEADS_BY_NAME[head].write(tmp_path), speculation={"taps": taps})
    assert message in str(caught.value)


def test_a_model_that_cannot_show_its_states(tmp_path: Path) -> None:
    """GPT-2's embeddings depend on positions: refused at the start, and not by the first request."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_embd=HIDDEN, n_layer=3, n_head=4, n_positions=256, bos_token_id=0, eos_token_id=2
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    write_tiny_tokenizer(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"cannot draft for this model: .*depend on positions"):
        start(tmp_path / "model", Head().write(tmp_path / "head"))


def test_pickled_heads(model: Path, tmp_path: Path) -> None:
    (Head().write(tmp_path) / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"has pickled weights only.*weights_only=True"):
        start(model, tmp_path)


def test_no_directory(model: Path, tmp_path: Path) -> None:
    for given, message in (("", "speculation.draft is not set"), (tmp_path / "none", "has no config.json")):
        with pytest.raises((ConfigError, PluginError)) as caught:
            start(model, given)
        assert message in str(caught.value)


def test_damaged_files(model: Path, tmp_path: Path) -> None:
    file = Head().write(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelError, match="is damaged"):
        start(model, tmp_path)
    file.unlink()
    with pytest.raises(ModelError, match=r"has no \*.safetensors file"):
        start(model, tmp_path)


def test_chains_need_no_tree_mask() -> None:
    declared = frozenset({"branches", "device", "judges"})
    assert EagleOptions(topk=1).provides(declared) == {"device"}
    assert EagleOptions(accept="thresholds").provides(declared) == {"device", "judges"}
    assert EagleOptions(topk=2).provides(declared) == declared - {"judges"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topk": 1, "steps": 3, "num_draft_tokens": 6}, "a chain (topk 1) has steps + 1 = 4"),
        ({"topk": 2, "steps": 2, "num_draft_tokens": 8}, "so that a tree has 7 at most"),
        ({"topk": 16, "steps": 6}, "(steps - 1) * topk is 80, and may be 64 at most"),
    ],
)
def test_bad_options(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        EagleOptions.model_validate(options)
    assert message in str(caught.value)


def test_trees_by_options() -> None:
    assert EagleOptions().nodes == 4
    assert EagleOptions(steps=5, topk=4).nodes == 8
    assert EagleOptions(steps=1, topk=3).nodes == 4


def test_whose_head_computed_kv(tmp_path: Path) -> None:
    """What is kept of its layer is found by the same head only, wherever it lies."""

    def numerics(head: Head, folder: str, seed: int = 0, **options: Any) -> str:
        context = SpeculatorContext(DEEP, 16, ModelContext(tmp_path, {}, torch.float32, torch.device("cpu")))
        directory = head.write(tmp_path / folder, seed)
        return EagleSpeculator(EagleOptions(draft=str(directory), **options), context).numerics()

    plain = numerics(Head(), "a")
    assert numerics(Head(), "b") == plain == numerics(Head(), "c", steps=1)
    others = [
        numerics(Head(), "d", seed=1),
        numerics(Head(config={"rms_norm_eps": 1e-3}), "e"),
        numerics(Head(), "f", taps=(4, 5, 6)),
    ]
    assert len({plain, *others}) == 4


def test_a_server_that_is_brought_kv_does_not_start(model: Path, tmp_path: Path) -> None:
    """What a head keeps of a prompt would not come with the prompt's KV."""
    speculation = {"use": "eagle", "draft": str(Head().write(tmp_path))}
    config = {"model": {"path": str(model), "dtype": "float32"}, "speculation": speculation, "log_level": "error"}
    with pytest.raises(ConfigError, match="'disagg' brings KV without what the speculator keeps of it"):
        Engine.from_config({**config, "gates": [{"use": "disagg", "role": "decode"}]})


def test_configs_are_read_as_json(tmp_path: Path) -> None:
    """A head's config.json that is none."""
    (Head().write(tmp_path) / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ModelError, match="must hold a JSON object"):
        read_draft(tmp_path, DEEP)
