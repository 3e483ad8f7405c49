"""Checkpoints of every format in a whole engine: they answer what the checkpoint of their exact numbers answers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from pegboard import Engine, SamplingParams
from pegboard.conformance.checkpoints import write_tiny_tokenizer
from pegboard.conformance.servers import serving
from pegboard.core.config.compose import compose
from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.model_family import ModelContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.cpu_native.runner import CpuNativeRunner
from pegboard.plugins.model_dense.family import DenseFamily
from pegboard.plugins.model_dense.options import DenseOptions
from pegboard.plugins.quantization.api import FormatContext, LinearContext
from pegboard.plugins.quantization.formats.fp8 import Fp8
from pegboard.plugins.quantization.torch_products import TorchProducts
from pegboard.toolkit.model.coded import SERVICE, QuantizedWeights, slots_of
from pegboard.toolkit.model.moe import MixtureOfExperts
from tests.e2e.reference import Comparison, Reference, assert_logits_agree, forced_logits
from tests.plugins.quantization.published import WRITERS, Writer, awq, published, tiny

TEXT = [*range(3, 43)]
LAST, NEW = 20, 16
GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True)
EACH = ("ct 4 bits zeros", "ct nvfp4", "modelopt mxfp8", "awq", "gptq act-order")
PLAIN: Mapping[str, Any] = {"attention": {"use": "torch"}, "runner": {"use": "layered"}}


def engine(directory: Path, *, dtype: str = "float32", use: str | None = "dense", **sections: Any) -> Engine:
    """An engine of little memory. `use` names the model's family."""
    model = {"path": str(directory), "dtype": dtype} | ({"use": use} if use else {})
    return Engine(compose(data={"model": model, "memory": {"max_total_tokens": 256}, **sections}, env={}))


def logits(directory: Path, **settings: Any) -> torch.Tensor:
    """Logits [LAST, vocab] of a text."""
    with engine(directory, **{**PLAIN, **settings}) as made:
        return forced_logits(made, TEXT, LAST)


Write = Callable[..., tuple[Path, Path]]


@pytest.fixture
def written(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Write:
    """Writes a tiny model in a format, and one of the numbers that it means."""

    def write(name: str, architecture: str = "llama", **overrides: Any) -> tuple[Path, Path]:
        plain = tiny(tmp_path_factory.getbasetemp() / "plain", architecture, **overrides)
        return published(tmp_path / f"{architecture} {name}", plain, WRITERS[name])

    return write


@pytest.mark.parametrize("name", WRITERS)
def test_logits_are_those_of_the_exact_weights(name: str, written: Write) -> None:
    """Bit by bit, whatever multiplies: by the same numbers."""
    coded, meant = written(name)
    expected = logits(meant)
    for use in ("dense", "torch"):
        assert torch.equal(logits(coded, quantization={"linear": {"use": use}}), expected), use


@pytest.mark.parametrize("name", ["fp8 blocks", "ct 4 bits zeros", "modelopt nvfp4", "awq", "gptq act-order"])
def test_answers_are_those_of_transformers(name: str, written: Write, tmp_path: Path) -> None:
    """Of the float32 model of the exact weights: logits within float32's sums, greedy tokens but for near-ties."""
    coded, meant = written(name)
    reference = Reference(meant, tmp_path)
    (answer,) = reference.answers([TEXT], NEW)
    with engine(coded, **PLAIN) as made:
        (found,) = made.generate([TEXT], GREEDY)
        text = [*TEXT, *answer.tokens]
        assert_logits_agree(forced_logits(made, text, LAST), reference.logits(text, LAST), name)
    comparison = Comparison()
    comparison.add(found.token_ids, answer, name)
    comparison.finish()


AWQ32 = Writer({"quant_method": "awq", "bits": 4, "group_size": 32}, awq(32))
"""The native runner keeps codes in groups that 32 divides."""


@pytest.mark.parametrize(
    ("writer", "kept"),
    [
        pytest.param(AWQ32, True, id="awq"),
        pytest.param(WRITERS["gptq symmetric"], True, id="gptq"),
        pytest.param(WRITERS["codes 4 bits"], True, id="kept codes"),
        pytest.param(WRITERS["awq"], False, id="groups of 16"),
        pytest.param(WRITERS["modelopt nvfp4"], False, id="nvfp4"),
    ],
)
def test_native_runner(writer: Writer, kept: bool, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """Whether codes stay or not, its tokens are those of the exact weights."""
    coded, meant = published(tmp_path / "written", tiny(tmp_path_factory.getbasetemp() / "plain"), writer)
    tokens, formats = _native(coded)
    expected, _ = _native(meant)
    assert tokens == expected
    assert ("int4" in formats) == kept


def _native(directory: Path) -> tuple[list[int], Collection[str]]:
    """Return what the native runner answers, and in which formats it keeps matrices."""
    runner = {"use": "cpu_native", "threads": 1}
    with engine(directory, dtype="bfloat16", use=None, runner=runner) as made:
        (found,) = made.generate([TEXT], GREEDY)
        assert isinstance(made.built.runner, CpuNativeRunner)
        return found.token_ids, made.built.runner.weights_by_format()


def test_experts_are_products_of_their_own(written: Write) -> None:
    coded, meant = written("fp8 small blocks", "qwen3_moe", moe_intermediate_size=64)
    expected = logits(meant)
    for use in ("dense", "torch"):
        assert torch.equal(logits(coded, quantization={"linear": {"use": use}}), expected), use


def test_experts_stay_codes(written: Write) -> None:
    coded, _ = written("fp8 small blocks", "qwen3_moe", moe_intermediate_size=64)
    config, slots, cpu = json.loads((coded / "config.json").read_text("utf-8")), slots_of(coded), torch.device("cpu")
    made = Fp8(NoOptions(), FormatContext(config["quantization_config"], slots))
    products = TorchProducts(NoOptions(), LinearContext(cpu, torch.float32))
    services = {SERVICE: QuantizedWeights(made.matrices(), made.unused(), slots, products)}
    family = DenseFamily(DenseOptions(), ModelContext(coded, config, torch.float32, cpu, services=services))
    network = family.load()
    assert isinstance(network, torch.nn.Module)
    assert any(isinstance(one, MixtureOfExperts) for one in network.modules())
    plain = {name for name in slots if name not in services[SERVICE].parts}
    held, stored = sum(one.numel() for one in network.parameters()), sum(math.prod(slots[one].shape) for one in plain)
    assert held == stored, "the quantised matrices are not parameters"


@pytest.mark.parametrize(("architecture", "name"), [("gemma2", "fp8 blocks"), *(("llama", one) for one in EACH)])
def test_through_transformers(architecture: str, name: str, written: Write) -> None:
    coded, meant = written(name, architecture)
    assert torch.equal(logits(coded, use="transformers"), logits(meant, use="transformers"))


def test_a_mistral_that_lists_types_of_layers(written: Write) -> None:
    """Which transformers makes a Ministral of, quantised or not. The text is longer than the window."""
    coded, meant = written("fp8 blocks", "mistral", sliding_window=8)
    everywhere = logits(meant)
    for directory in (coded, meant):
        config = json.loads((directory / "config.json").read_text("utf-8"))
        config["layer_types"] = ["full_attention", "sliding_attention"]
        (directory / "config.json").write_text(json.dumps(config), "utf-8")
    found = logits(coded, use="transformers")
    assert not torch.allclose(found, everywhere, rtol=0.01)
    assert torch.equal(found, logits(meant, use="transformers"))
    torch.testing.assert_close(found, logits(meant), rtol=1e-4, atol=1e-4)


def test_absorbed_matrices_of_latents(written: Write) -> None:
    """That of DeepSeek-V3 is quantised as any other matrix, and is taken by the exact numbers of its codes."""
    coded, meant = written("fp8 blocks", "deepseek_v3", head_dim=8)
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    assert slots_of(coded)[name].dtype is torch.float8_e4m3fn
    assert torch.equal(logits(coded, use="transformers"), logits(meant, use="transformers"))


def test_a_config_in_a_file_of_its_own(written: Write) -> None:
    """As older exports of ModelOpt have it, with nothing in config.json."""
    coded, meant = written("modelopt fp8")
    config = json.loads((coded / "config.json").read_text("utf-8"))
    told = config.pop("quantization_config")
    (coded / "config.json").write_text(json.dumps(config), "utf-8")
    (coded / "hf_quant_config.json").write_text(
        json.dumps({"producer": told["producer"], "quantization": {"quant_algo": told["quant_algo"]}}), "utf-8"
    )
    for use in ("dense", "transformers"):
        assert torch.equal(logits(coded, use=use), logits(meant, use=use))


@pytest.mark.parametrize("use", ["dense", "transformers"])
def test_keys_and_values_alone_in_a_file_of_its_own(use: str, written: Write, caplog: pytest.LogCaptureFixture) -> None:
    """Weights are plain then, and the start says for which KV the checkpoint was made."""
    _, meant = written("awq")
    expected = logits(meant, use=use)
    told = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (meant / "hf_quant_config.json").write_text(json.dumps(told), "utf-8")
    with caplog.at_level("INFO"):
        assert torch.equal(logits(meant, use=use), expected)
    assert "the checkpoint was made for fp8_e4m3" in caplog.text


def test_a_part_that_is_plain(written: Write) -> None:
    """Codes say what is quantised: here not the values of one layer, beside its queries and keys."""
    from safetensors.torch import load_file, save_file

    coded, meant = written("fp8 small blocks")
    tensors, numbers = (load_file(one / "model.safetensors") for one in (coded, meant))
    name = "model.layers.1.self_attn.v_proj.weight"
    del tensors[f"{name}_scale_inv"]
    tensors[name] = numbers[name]
    save_file(tensors, coded / "model.safetensors", metadata={"format": "pt"})
    for use in ("dense", "torch"):
        assert torch.equal(logits(coded, quantization={"linear": {"use": use}}), logits(meant))


def test_drawn_weights_need_no_checkpoint(written: Write) -> None:
    """With a config that says how its weights are quantised, and none beside it."""
    coded, _ = written("awq")
    (coded / "model.safetensors").unlink()
    model = {
        "path": str(coded),
        "use": "dense",
        "load_format": "dummy",
        "source": {"use": "hf", "needs_weights": False},
    }
    with Engine(compose(data={"model": model, "memory": {"max_total_tokens": 256}, **PLAIN}, env={})) as made:
        assert len(made.generate([TEXT], GREEDY)[0].token_ids) == NEW
    model["load_format"] = "auto"
    with pytest.raises(ModelError, match=r"has no \*\.safetensors file"):
        Engine(compose(data={"model": model, "memory": {"max_total_tokens": 256}, **PLAIN}, env={}))


def test_over_http(written: Write) -> None:
    """What a server answers is what an engine of the exact weights does, and it says what multiplies."""
    coded, meant = written("awq")
    for directory in (coded, meant):
        write_tiny_tokenizer(directory)
    with engine(meant, **PLAIN) as made:
        (expected,) = made.generate([TEXT], GREEDY)
    model = {"path": str(coded), "dtype": "float32", "use": "dense"}
    config = {"model": model, "memory": {"max_total_tokens": 256}, "apis": ["native"], **PLAIN}
    sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    with serving(config) as server, httpx.Client(base_url=server.address, timeout=120, trust_env=False) as client:
        answer = client.post("/generate", json={"input_ids": TEXT, "sampling_params": sampling}).json()
        info = client.get("/server_info").json()
    assert answer["output_ids"] == expected.token_ids
    assert (info["providers"]["weight_format"], info["providers"]["linear"]) == (["awq"], ["dense"])
