"""The conformance suite of ModelFamily.

A network is run over plain paged memory (see `rig.paged`) and compared with the same checkpoint in transformers.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard.conformance.model_family.additions import AdditionTests
from pegboard.conformance.model_family.base import assert_close
from pegboard.conformance.model_family.graphs import GraphTests
from pegboard.conformance.model_family.overlay import OverlayTests
from pegboard.conformance.model_family.ranks import RankTests
from pegboard.conformance.model_family.scales import ScaleTests
from pegboard.conformance.model_family.sections import SectionTests
from pegboard.conformance.model_family.states import StateTests
from pegboard.conformance.model_family.taps import TapTests
from pegboard.conformance.model_family.updates import UpdateTests
from pegboard.conformance.rig.model_references import context, prompts, reference_logits, text_config
from pegboard.conformance.rig.paged import PagedRun, PlainAttention
from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.model_family import ModelContext, ModelFamily

_GARBAGE: tuple[Mapping[str, Any], ...] = (
    {},
    {"architectures": ["NobodysForCausalLM"], "model_type": "nobodys"},
    {"architectures": []},
    {"model_type": "nobodys"},
    {"architectures": ["BertForMaskedLM"], "model_type": "bert"},
)

_KEEPS_STATES = "linear_attention"
"""What transformers calls a layer that keeps states in place of keys and values."""

_SPOILED: tuple[Mapping[str, Any], ...] = (
    {"num_attention_heads": 0},
    {"num_attention_heads": "four"},
    {"hidden_size": None},
    {"hidden_size": -64},
    {"num_hidden_layers": "three"},
)


class ModelFamilyContract(
    AdditionTests, OverlayTests, TapTests, GraphTests, ScaleTests, RankTests, SectionTests, UpdateTests, StateTests
):
    """What every family must do for each tiny checkpoint that it supports.

    `architectures` are names that `make_checkpoint` takes. A family of none of the kit's architectures sets its
    own, and overrides `make_checkpoint`; transformers must then know them, for it is what the logits are compared
    with.
    """

    contract = "model_family"

    # What is known without weights

    def test_supports_a_checkpoint(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        reasons = {}
        for architecture in self.architectures:
            ctx = context(self._checkpoint(architecture, tmp_path_factory))
            reasons[architecture] = self.objection(ctx)
        assert None in reasons.values(), f"none is supported, so nothing is tested; set `architectures`: {reasons}"

    def test_refusals_are_reasons(self, architecture: str, checkpoint: Path) -> None:
        reason: object = self.objection(context(checkpoint))
        assert reason is None or (isinstance(reason, str) and reason.strip()), "a refusal says why"

    @pytest.mark.parametrize("config", _GARBAGE, ids=str)
    def test_refuses_what_is_no_model(self, config: Mapping[str, Any], tmp_path: Path) -> None:
        ctx = ModelContext(tmp_path, dict(config), torch.float32, torch.device("cpu"))
        _assert_refused(self.objection(ctx))

    @pytest.mark.parametrize("change", _SPOILED, ids=str)
    def test_refuses_spoiled_configs(self, architecture: str, checkpoint: Path, change: Mapping[str, Any]) -> None:
        self.build(context(checkpoint))  # skips where the family supports the architecture not at all
        _assert_refused(self.objection(context(checkpoint, **change)))

    def test_refuses_unknown_rope(self, architecture: str, checkpoint: Path) -> None:
        self.build(context(checkpoint))
        rope = {**(text_config(checkpoint).get("rope_parameters") or {}), "rope_type": "spiral"}
        _assert_refused(self.objection(context(checkpoint, rope_parameters=rope)))

    def test_spec_matches_config(self, architecture: str, checkpoint: Path) -> None:
        from transformers import AutoConfig

        spec = self.build(context(checkpoint)).spec
        whole = AutoConfig.from_pretrained(checkpoint)
        config = whole.get_text_config()
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        sizes = getattr(config, "num_key_value_heads", heads), head_dim, head_dim
        latent = getattr(config, "kv_lora_rank", None)
        if latent is not None:
            sizes = 1, latent + config.qk_rope_head_dim, latent
        assert spec.architecture == whole.architectures[0]
        assert (spec.vocab_size, spec.hidden_size) == (config.vocab_size, config.hidden_size)
        assert spec.max_context_len == config.max_position_embeddings
        assert config.eos_token_id in spec.eos_token_ids
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        attending = len(kinds) - kinds.count(_KEEPS_STATES)
        assert [layer.layer_id for layer in spec.layers] == list(range(attending))
        assert bool(spec.states) == (attending < len(kinds))
        for layer in spec.layers:
            assert layer.num_heads == heads
            assert (layer.num_kv_heads, layer.qk_head_dim, layer.v_head_dim) == sizes
            assert layer.latent == (latent is not None)
            assert layer.scale > 0

    def test_every_layer_is_in_one_group(self, architecture: str, checkpoint: Path) -> None:
        spec = self.build(context(checkpoint)).spec
        for layer in spec.layers:
            groups = [index for index, group in enumerate(spec.kv_groups) if layer.layer_id in group.layer_ids]
            assert groups == [layer.kv_group]
        assert sum(len(group.layer_ids) for group in spec.kv_groups) == len(spec.layers)

    def test_windows_match_config(self, architecture: str, checkpoint: Path) -> None:
        from transformers import AutoConfig

        spec = self.build(context(checkpoint)).spec
        config = AutoConfig.from_pretrained(checkpoint).get_text_config()
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(spec.layers)
        expected = [window if kind == "sliding_attention" else None for kind in kinds if kind != _KEEPS_STATES]
        assert [layer.window for layer in spec.layers] == expected

    def test_context_length_caps(self, architecture: str, checkpoint: Path) -> None:
        assert self.build(context(checkpoint, context_length=100)).spec.max_context_len == 100

    def test_context_length_above_the_models_is_refused(self, architecture: str, checkpoint: Path) -> None:
        self.build(context(checkpoint))
        ctx = context(checkpoint, context_length=1 << 20)
        if self.objection(ctx) is None:
            with pytest.raises(ModelError, match=r"\d"):
                self.build(ctx)

    def test_reads_no_weights_before_load(self, architecture: str, checkpoint: Path, tmp_path: Path) -> None:
        self.build(context(checkpoint))
        spoiled = _copy(checkpoint, tmp_path)
        (spoiled / "model.safetensors").write_bytes(b"\xff" * 64)
        assert self.objection(context(spoiled)) is None
        assert self.build(context(spoiled)).spec.layers
        (spoiled / "model.safetensors").unlink()
        assert self.objection(context(spoiled)) is None
        assert self.build(context(spoiled)).spec.layers

    # Loading

    def test_damaged_file_is_named(self, architecture: str, checkpoint: Path, tmp_path: Path) -> None:
        spoiled = _copy(checkpoint, tmp_path)
        (spoiled / "model.safetensors").write_bytes(b"\xff" * 64)
        assert "model.safetensors" in self._load_error(spoiled)

    def test_missing_file_is_named(self, architecture: str, checkpoint: Path, tmp_path: Path) -> None:
        spoiled = _copy(checkpoint, tmp_path)
        (spoiled / "model.safetensors").unlink()
        assert str(spoiled) in self._load_error(spoiled)

    def test_missing_tensor_is_named(self, architecture: str, checkpoint: Path, tmp_path: Path) -> None:
        spoiled = _copy(checkpoint, tmp_path)
        name = _edit(spoiled, lambda tensors, name: tensors.pop(name))
        assert name in self._load_error(spoiled)

    def test_wrong_shape_is_named(self, architecture: str, checkpoint: Path, tmp_path: Path) -> None:
        spoiled = _copy(checkpoint, tmp_path)

        def shorten(tensors: dict[str, torch.Tensor], name: str) -> None:
            tensors[name] = tensors[name][:-1].clone()

        name = _edit(spoiled, shorten)
        error = self._load_error(spoiled)
        assert name in error
        tensors = _tensors(spoiled)
        assert str(list(tensors[name].shape)) in error.replace("(", "[").replace(")", "]"), error

    def _load_error(self, directory: Path) -> str:
        family = self.build(context(directory))
        with pytest.raises(ModelError) as raised:
            family.load()
        return str(raised.value)

    def test_sharded_checkpoint(self, architecture: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        whole = self._checkpoint(architecture, tmp_path_factory)
        self.build(context(whole))
        sharded = _shard(whole, tmp_path_factory.mktemp("sharded"))
        prompt = prompts(whole)[1]
        assert_close(self._run(sharded).step({0: prompt})[0], self._run(whole).step({0: prompt})[0])

    def test_half_precision(self, architecture: str, checkpoint: Path) -> None:
        ctx = dataclasses.replace(context(checkpoint), dtype=torch.bfloat16)
        family: ModelFamily = self.build(ctx)
        run = PagedRun(family.load(), family.spec, dtype=torch.bfloat16)
        prompt = prompts(checkpoint)[1]
        with torch.inference_mode():
            batch = run.batch({0: prompt})
            run.attention.prepare(batch)
            hidden = run.network.forward(batch)
            logits = run.network.logits(hidden)
        assert hidden.dtype == torch.bfloat16
        assert logits.dtype == torch.float32
        # bfloat16 has 8 bits of mantissa; three layers of random weights make a few per cent of that.
        expected = reference_logits(checkpoint)[1]
        assert float((logits - expected).norm() / expected.norm()) < 0.15

    # The forward pass

    def test_equals_transformers(self, architecture: str, checkpoint: Path) -> None:
        for prompt, expected in zip(prompts(checkpoint), reference_logits(checkpoint), strict=True):
            assert_close(self._run(checkpoint).step({0: prompt})[0], expected)

    def test_in_chunks(self, architecture: str, checkpoint: Path) -> None:
        run, prompt, expected = self._run(checkpoint), prompts(checkpoint)[0], reference_logits(checkpoint)[0]
        cuts = [0, 7, 8, 30, len(prompt)]
        for start, stop in itertools.pairwise(cuts):
            assert_close(run.step({0: prompt[start:stop]})[0], expected[start:stop])

    def test_token_by_token(self, architecture: str, checkpoint: Path) -> None:
        run, prompt, expected = self._run(checkpoint), prompts(checkpoint)[0], reference_logits(checkpoint)[0]
        first = len(prompt) - 6
        run.step({0: prompt[:first]})
        for position in range(first, len(prompt)):
            logits = run.step({0: prompt[position : position + 1]}, decode=True)[0]
            assert_close(logits, expected[position : position + 1])

    def test_ragged_batch(self, architecture: str, checkpoint: Path) -> None:
        run, all_prompts, expected = self._run(checkpoint), prompts(checkpoint), reference_logits(checkpoint)
        found = run.step(dict(enumerate(all_prompts)))
        for request, logits in found.items():
            assert_close(logits, expected[request])

    def test_mixed_batch(self, architecture: str, checkpoint: Path) -> None:
        """One request extends after a prefix, one decodes, one begins."""
        run, (long, middle, short), expected = self._run(checkpoint), prompts(checkpoint), reference_logits(checkpoint)
        run.step({0: long[:20], 1: middle[:-1]})
        found = run.step({0: long[20:], 1: middle[-1:], 2: short})
        assert_close(found[0], expected[0][20:])
        assert_close(found[1], expected[1][-1:])
        assert_close(found[2], expected[2])

    def test_decodes_together(self, architecture: str, checkpoint: Path) -> None:
        run, all_prompts, expected = self._run(checkpoint), prompts(checkpoint), reference_logits(checkpoint)
        run.step({request: prompt[:-2] for request, prompt in enumerate(all_prompts)})
        for back in (-2, -1):
            new = {request: [prompt[back]] for request, prompt in enumerate(all_prompts)}
            for request, logits in run.step(new, decode=True).items():
                assert_close(logits[0], expected[request][back])

    def test_order_does_not_matter(self, architecture: str, checkpoint: Path) -> None:
        run, all_prompts, expected = self._run(checkpoint), prompts(checkpoint), reference_logits(checkpoint)
        found = run.step({request: all_prompts[request] for request in (2, 0, 1)})
        for request, logits in found.items():
            assert_close(logits, expected[request])

    def test_keeps_nothing_between_batches(self, architecture: str, checkpoint: Path) -> None:
        family, network = self._load(checkpoint)
        prompt = prompts(checkpoint)[1]
        first = PagedRun(network, family.spec).step({0: prompt})[0]
        PagedRun(network, family.spec).step({1: prompts(checkpoint)[0]})
        again = PagedRun(network, family.spec).step({0: prompt})[0]
        assert torch.equal(first, again)

    # Logits

    def test_logits_are_float32_and_the_callers(self, architecture: str, checkpoint: Path) -> None:
        run, prompt = self._run(checkpoint), prompts(checkpoint)[1]
        with torch.inference_mode():
            batch = run.batch({0: prompt})
            run.attention.prepare(batch)
            hidden = run.network.forward(batch)
            logits = run.network.logits(hidden)
            kept = logits.clone()
            assert hidden.shape == (len(prompt), run.spec.hidden_size)
            assert logits.dtype == torch.float32
            assert logits.shape == (len(prompt), run.spec.vocab_size)
            again = run.network.logits(hidden)
            logits.fill_(float("nan"))
            assert torch.equal(again, kept), "filling one result changed another"
            assert torch.equal(run.network.logits(hidden), kept)

    def test_logits_of_some_rows(self, architecture: str, checkpoint: Path) -> None:
        run, prompt, expected = self._run(checkpoint), prompts(checkpoint)[1], reference_logits(checkpoint)[1]
        with torch.inference_mode():
            batch = run.batch({0: prompt})
            run.attention.prepare(batch)
            hidden = run.network.forward(batch)
            assert_close(run.network.logits(hidden[[3, 1]]), expected[[3, 1]])
            assert_close(run.network.logits(hidden[-1:]), expected[-1:])

    # Memory

    def test_writes_only_its_slots(self, architecture: str, checkpoint: Path) -> None:
        run, prompt = self._run(checkpoint), prompts(checkpoint)[1]
        run.step({1: prompt[:9]})
        run.step({1: prompt[9:]})
        own = set(run.table[2, : len(prompt)].tolist())
        for layer in run.spec.layers:
            for buffer in (run.pool.keys(layer.layer_id), run.pool.values(layer.layer_id)):
                filled = set((~buffer.isnan()).flatten(1).any(-1).nonzero().flatten().tolist())
                assert filled == own, f"layer {layer.layer_id}: KV at other slots than out_cache_loc, or not at all"

    def test_reads_only_its_slots(self, architecture: str, checkpoint: Path) -> None:
        """What other requests have left, NaN included, changes nothing."""
        run, (long, middle, _), expected = self._run(checkpoint), prompts(checkpoint), reference_logits(checkpoint)
        run.step({0: long[:-1], 1: middle})
        own = torch.from_numpy(run.table[1, : len(long)]).long()
        for layer in run.spec.layers:
            for buffer in (run.pool.keys(layer.layer_id), run.pool.values(layer.layer_id)):
                kept = buffer[own].clone()
                buffer.fill_(float("nan"))
                buffer[own] = kept
        assert_close(run.step({0: long[-1:]}, decode=True)[0], expected[0][-1:])

    def test_attends_once_per_layer(self, architecture: str, checkpoint: Path) -> None:
        run = self._run(checkpoint)
        assert isinstance(run.attention, PlainAttention)
        run.step({0: prompts(checkpoint)[2]})
        assert sorted(run.attention.called) == [layer.layer_id for layer in run.spec.layers]


def _assert_refused(reason: object) -> None:
    assert isinstance(reason, str), "accepted"
    assert reason.strip(), "a refusal says why"


def _copy(checkpoint: Path, directory: Path) -> Path:
    return Path(shutil.copytree(checkpoint, directory / "copy"))


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def _edit(directory: Path, change: Any) -> str:
    """Apply `change(tensors, name)` to a matrix of the second layer, and write the file again. Returns the name.

    It is not an expert's, which a library may have joined with others before it says what is wrong.
    """
    from safetensors.torch import save_file

    tensors = _tensors(directory)
    names = [
        name for name, tensor in tensors.items() if tensor.dim() == 2 and ".1." in name and ".experts." not in name
    ]
    name = sorted(names)[0]
    change(tensors, name)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return name


def _shard(checkpoint: Path, directory: Path) -> Path:
    """Return the same checkpoint in two files with an index."""
    from safetensors.torch import save_file

    target = Path(shutil.copytree(checkpoint, directory / "copy"))
    tensors = _tensors(target)
    (target / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, target / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return target
