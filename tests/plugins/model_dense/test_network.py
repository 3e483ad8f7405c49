"""Every option that changes the network's arithmetic, against transformers; and what loading keeps in memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.model_family.base import TOLERANCE
from pegboard.conformance.rig.model_references import context
from pegboard.conformance.rig.paged import PagedRun
from pegboard.core.interfaces.errors import ConfigError, ModelError
from pegboard.core.interfaces.forward import ForwardMode
from pegboard.plugins.model_dense.family import DenseFamily
from pegboard.plugins.model_dense.network import DenseNetwork
from pegboard.plugins.model_dense.options import DenseOptions
from pegboard.toolkit.model.packed import why_not_packed

ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0},
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"llama-{name}": ("llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-3}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "mistral-one-key": ("mistral", {"sliding_window": 1}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2-late-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen2-layer-types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "moe-weights-as-they-are": ("qwen3_moe", {"norm_topk_prob": False}),
    "moe-every-other-layer": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
    "moe-one-expert": ("qwen3_moe", {"num_experts_per_tok": 1, "hidden_act": "gelu"}),
    "moe-all-experts": ("qwen3_moe", {"num_experts_per_tok": 6, "attention_bias": True}),
    "mixtral": ("mixtral", {}),
    "moe-window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 16}),
}


def load(directory: Path, packed: str = "auto", dtype: torch.dtype = torch.float32, **changes: Any) -> PagedRun:
    ctx = replace(context(directory, **changes), dtype=dtype)
    family = DenseFamily(DenseOptions.model_validate({"packed": packed}), ctx)
    return PagedRun(family.load(), family.spec, dtype=dtype)


def reference(directory: Path, ids: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def random_ids(n: int) -> list[int]:
    return torch.randint(0, 320, (n,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers(variant: str, tmp_path: Path) -> None:
    architecture, overrides = VARIANTS[variant]
    directory = tiny_checkpoint(tmp_path, architecture, **overrides)
    ids = random_ids(100)
    expected = reference(directory, ids)
    found = load(directory).step({0: ids})[0]
    assert float((found - expected).abs().max() / expected.abs().max()) < TOLERANCE


def test_older_rope_keys_mean_the_same(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, "llama", rope_parameters=ROPES["llama3"])
    older = {key: value for key, value in ROPES["llama3"].items() if key != "rope_theta"}
    ids = random_ids(80)
    new = load(directory).step({0: ids})[0]
    old = load(directory, rope_parameters=None, rope_theta=10000.0, rope_scaling=older).step({0: ids})[0]
    assert torch.equal(new, old)


def test_idle_batch_has_no_rows(tmp_path: Path) -> None:
    run = load(tiny_checkpoint(tmp_path, "llama"))
    batch = run.batch({0: [1]})
    batch.forward_mode = ForwardMode.IDLE
    batch.input_ids, batch.positions = batch.input_ids[:0], batch.positions[:0]
    hidden = run.network.forward(batch)
    assert hidden.shape == (0, 64)
    assert run.network.logits(hidden).shape == (0, 320)
    assert run.attention.called == []  # type: ignore[attr-defined]


def test_loading_fills_the_fused_buffers_in_place(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, "qwen2")
    network = load(directory, "off").network
    assert isinstance(network, DenseNetwork)
    file_bytes = sum(tensor.nbytes for tensor in load_file(directory / "model.safetensors").values())
    own = {parameter.data_ptr(): parameter.nbytes for parameter in network.parameters()}
    assert sum(own.values()) == file_bytes
    storages = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    targets = [target for target in network.targets().values() if isinstance(target, torch.Tensor)]
    assert {target.untyped_storage().data_ptr() for target in targets} == storages


@pytest.fixture
def fresh() -> Iterator[None]:
    """Whether this machine can pack is found out anew, and again after the test."""
    why_not_packed.cache_clear()
    yield
    why_not_packed.cache_clear()


packs = pytest.mark.skipif(
    why_not_packed(torch.bfloat16, torch.device("cpu")) is not None, reason="this torch cannot pack weights"
)


class TestPacked:
    """Weights in oneDNN's layout."""

    @packs
    @pytest.mark.parametrize("variant", ["llama-biases", "llama-tied", "qwen2-untied"])
    @pytest.mark.parametrize("count", [1, 5, 100])
    def test_says_the_same(self, variant: str, count: int, tmp_path: Path) -> None:
        """To the last bit, since torch multiplies bfloat16 by oneDNN in any case."""
        architecture, overrides = VARIANTS[variant]
        directory = tiny_checkpoint(tmp_path, architecture, **overrides)
        ids = random_ids(count)
        plain, packed = (load(directory, how, torch.bfloat16).step({0: ids})[0] for how in ("off", "on"))
        assert torch.equal(plain, packed)

    @packs
    @pytest.mark.parametrize("variant", ["llama-tied", "qwen2-untied"])
    def test_no_matrix_stays_unpacked(self, variant: str, tmp_path: Path) -> None:
        architecture, overrides = VARIANTS[variant]
        network = load(tiny_checkpoint(tmp_path, architecture, **overrides), "on", torch.bfloat16).network
        assert isinstance(network, DenseNetwork)
        names = [name for name, parameter in network.named_parameters() if parameter.dim() == 2]
        assert names == ["embedding.weight"], "whose rows are looked up"

    def test_off(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO):
            network = load(tiny_checkpoint(tmp_path, "llama"), "off").network
        assert isinstance(network, DenseNetwork)
        assert "linear layers: plain torch; model.packed is off" in caplog.messages
        network.targets()

    @pytest.mark.parametrize("problem", ["missing", "wrong"])
    def test_plain_where_it_does_not_work(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        fresh: None,
        problem: str,
    ) -> None:
        def missing(weight: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no such operator\nand a trace")

        monkeypatch.setattr("pegboard.toolkit.model.packed.pack", missing if problem == "missing" else torch.zeros_like)
        if problem == "wrong":
            monkeypatch.setattr(
                "pegboard.toolkit.model.packed.packed_linear",
                lambda x, weight: torch.nn.functional.linear(x, weight),
            )
        directory, ids = tiny_checkpoint(tmp_path, "llama"), random_ids(9)
        with caplog.at_level(logging.INFO):
            found = load(directory, dtype=torch.bfloat16).step({0: ids})[0]
        (line,) = [one for one in caplog.messages if "linear layers" in one]
        assert line.startswith("linear layers: plain torch; ")
        assert ("cannot pack bfloat16: no such operator" if problem == "missing" else "are wrong on this CPU") in line
        assert torch.equal(found, load(directory, "off", torch.bfloat16).step({0: ids})[0])
        with pytest.raises(ConfigError, match=r"model\.packed: .*leave it at auto"):
            load(directory, "on", torch.bfloat16)

    def test_types_and_devices_that_are_not_packed(self) -> None:
        for dtype in (torch.float16, torch.float32):
            assert str(dtype).removeprefix("torch.") in str(why_not_packed(dtype, torch.device("cpu")))
        assert "cuda" in str(why_not_packed(torch.bfloat16, torch.device("cuda")))

    @packs
    def test_said_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO):
            load(tiny_checkpoint(tmp_path, "llama"), dtype=torch.bfloat16).step({0: [5, 6]})
        assert caplog.messages.count("linear layers: weights packed by oneDNN") == 1


def test_tied_checkpoints_may_carry_a_head(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, "qwen2")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, file)
    load(directory)


def test_tensors_without_a_place_are_refused(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path, "llama")
    file = directory / "model.safetensors"
    save_file({**load_file(file), "model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, file)
    with pytest.raises(ModelError, match=r"q_proj\.bias \[64\] has no place"):
        load(directory)


def test_context_length_above_the_model_is_refused(tmp_path: Path) -> None:
    ctx = context(tiny_checkpoint(tmp_path, "llama"), context_length=5000)
    with pytest.raises(ModelError, match="5000 is above the 4096 tokens of this model"):
        DenseFamily(DenseOptions(), ctx)
