"""The text parts of Qwen2-VL, 2.5-VL, 3-VL and 3-VL-MoE against transformers: from every layout of a checkpoint, and
with the states, deep states and positions that transformers' own model is given.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pegboard.conformance.rig.model_references import context, lay_over, overlaid_prompts, prompts, transformers_model
from pegboard.conformance.rig.paged import PagedRun
from pegboard.conformance.vl_checkpoints import VL_FAMILIES, Names, vl_checkpoint
from pegboard.core.interfaces.errors import ModelError
from pegboard.plugins.model_dense.family import DenseFamily
from pegboard.plugins.model_dense.options import DenseOptions

TOLERANCE = 6e-4
"""Of logits of about 6, as conformance/model_family/base.py derives it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("towers")


def load(directory: Path) -> PagedRun:
    family = DenseFamily(DenseOptions(), context(directory))
    return PagedRun(family.load(), family.spec)


@pytest.mark.parametrize("names", ["new", "hub", "old"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", VL_FAMILIES)
def test_without_media(family: str, tied: bool, names: Names, folder: Path) -> None:
    """From one file and from many. The weights are the same under all names, not all of which transformers knows."""
    newest = vl_checkpoint(folder, family, tie_word_embeddings=tied)
    prompt = prompts(newest)[0]
    with torch.inference_mode():
        expected = transformers_model(newest)(torch.tensor([prompt]), use_cache=False).logits[0]
    for shards in ("5GB", "100KB"):
        directory = vl_checkpoint(folder, family, names=names, tie_word_embeddings=tied, max_shard_size=shards)
        found = load(directory).step({0: prompt})[0]
        assert float((found - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize("family", VL_FAMILIES)
def test_as_transformers_lays_states_over(family: str, folder: Path) -> None:
    """Its language model takes embeddings, positions of three axes and, of Qwen3-VL, a mask and deep states."""
    directory = vl_checkpoint(folder, family)
    model, run = transformers_model(directory), load(directory)
    for request, prompt in enumerate(overlaid_prompts(directory, 3)):
        given = prompt if family.startswith("qwen3") else prompt.flat()
        mask = torch.zeros(1, len(given.tokens), dtype=torch.bool)
        mask[0, given.rows] = True
        deep = {"visual_pos_masks": mask, "deepstack_visual_embeds": list(given.deep)} if given.deep else {}
        with torch.inference_mode():
            embeddings = model.get_input_embeddings()(torch.tensor([given.tokens]))
            embeddings[0, given.rows] = given.states
            tower = model.model.language_model
            output = tower(inputs_embeds=embeddings, position_ids=given.positions[:, None], use_cache=False, **deep)
            expected = model.lm_head(output.last_hidden_state)[0]
            batch = run.batch({request: given.tokens})
            lay_over(batch, [given])
            run.attention.prepare(batch)
            found = run.network.logits(run.network.forward(batch))
        assert float((found - expected).abs().max()) < TOLERANCE


def test_a_tower_with_a_tensor_too_many(folder: Path, tmp_path: Path) -> None:
    """What looks like the decoder's is not taken for the vision tower's."""
    from safetensors.torch import load_file, save_file

    directory = vl_checkpoint(tmp_path, "qwen3_vl")
    file = directory / "model.safetensors"
    name = "model.language_model.layers.0.self_attn.q_proj.bias"
    save_file({**load_file(file), name: torch.ones(64)}, file)
    with pytest.raises(ModelError, match=r"q_proj\.bias \[64\] has no place in this model"):
        load(directory)
