"""GGUF files made here convert to what they were made from; conversion is atomic, shared, and refuses what it must."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer as Backend

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.model_source import ModelSourceContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.model_sources.gguf import convert as gguf_convert
from pegboard.plugins.model_sources.gguf import weights as gguf_weights
from pegboard.plugins.model_sources.gguf.codes import QUANTIZATION
from pegboard.plugins.model_sources.gguf.convert import convert_gguf
from pegboard.plugins.model_sources.gguf.source import GGUFSource
from pegboard.plugins.model_sources.gguf.weights import hf_name, unpermute
from pegboard.plugins.quantization.api import FormatContext
from pegboard.plugins.quantization.formats.codes import KeptCodes
from pegboard.toolkit.model.coded import slots_of
from pegboard.toolkit.text.tokenizer import Tokenizer
from tests.toolkit.text.demo import STRINGS

_PARTS = {
    **{hf: name for name, hf in gguf_weights._BLOCK.items()},
    **{hf: name for name, hf in gguf_weights._TOP.items()},
}


def permute(weight: Any, heads: int) -> Any:
    """llama.cpp's own permutation of q and k rows."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def gguf_name(name: str) -> str:
    pieces = name.split(".")
    if pieces[1] == "layers":
        return f"blk.{pieces[2]}.{_PARTS['.'.join(pieces[3:-1])]}.{pieces[-1]}"
    return f"{_PARTS['.'.join(pieces[:-1])]}.{pieces[-1]}"


def write_gguf(
    file: Path, checkpoint: Path, architecture: str, *, kind: str = "F32", part: int = 0, zeros: str = "", **extra: Any
) -> dict[str, Any]:
    """`checkpoint` as a GGUF file, as llama.cpp's converter writes one, its matrices stored as `kind`, with `part`
    tensors to a file where that is not 0; the first row of the one called `zeros` is 0. Returns the checkpoint's
    tensors.
    """
    stored = gguf.GGMLQuantizationType[kind]
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    tensors = load_file(checkpoint / "model.safetensors")
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=part)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if architecture == "qwen3":
        writer.add_key_length(config["head_dim"])
    _write_tokenizer(writer, checkpoint)
    for key, value in extra.items():
        writer.add_key_value(key.replace("__", "."), *value)
    for name, tensor in tensors.items():
        values = tensor
        if name == zeros:
            values[0] = 0
        if architecture == "llama" and "q_proj" in name:
            values = permute(tensor, config["num_attention_heads"])
        if architecture == "llama" and "k_proj" in name:
            values = permute(tensor, config["num_key_value_heads"])
        if kind != "F32" and values.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quantize(values, stored), raw_dtype=stored)
        else:
            writer.add_tensor(gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dict(tensors)


def _write_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path) -> None:
    model = json.loads((checkpoint / "tokenizer.json").read_text("utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index < 3 else 1 for index in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages | length }}")


def converted_tensors(directory: Path) -> dict[str, Any]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_round_trip(architecture: str, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, architecture)
    tensors = write_gguf(tmp_path / "model.gguf", checkpoint, architecture)
    directory = convert_gguf(tmp_path / "model.gguf", tmp_path / "cache")
    found = converted_tensors(directory)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)
    before = json.loads((checkpoint / "config.json").read_text("utf-8"))
    after = json.loads((directory / "config.json").read_text("utf-8"))
    for key in (
        "architectures",
        "hidden_size",
        "num_key_value_heads",
        "rms_norm_eps",
        "tie_word_embeddings",
        "vocab_size",
    ):
        assert after[key] == before[key], key
    assert after["rope_theta"] == before["rope_parameters"]["rope_theta"]


class TestParts:
    """A model in several files."""

    @pytest.fixture
    def parts(self, tmp_path: Path) -> list[Path]:
        write_gguf(tmp_path / "m.gguf", tiny_checkpoint(tmp_path, "llama"), "llama", part=8)
        return sorted(tmp_path.glob("m-*.gguf"))

    def test_any_part_stands_for_all(self, parts: list[Path], tmp_path: Path) -> None:
        [checkpoint] = (one.parent for one in tmp_path.glob("*/config.json"))
        whole = write_gguf(tmp_path / "whole.gguf", checkpoint, "llama")
        assert len(parts) > 2
        directories = {convert_gguf(part, tmp_path / "cache") for part in parts}
        assert len(directories) == 1
        found = converted_tensors(directories.pop())
        assert found.keys() == whole.keys()
        for name, tensor in whole.items():
            np.testing.assert_array_equal(found[name], tensor, err_msg=name)

    def test_a_changed_part_is_converted_anew(self, parts: list[Path], tmp_path: Path) -> None:
        before = convert_gguf(parts[0], tmp_path / "cache")
        data = bytearray(parts[-1].read_bytes())
        data[-1] ^= 1
        parts[-1].write_bytes(data)
        assert convert_gguf(parts[0], tmp_path / "cache") != before

    def test_missing_parts_are_named(self, parts: list[Path], tmp_path: Path) -> None:
        parts[1].unlink()
        with pytest.raises(ModelError, match=rf"in {len(parts)} files, of which {parts[1].name} is not beside it"):
            convert_gguf(parts[0], tmp_path / "cache")
        with pytest.raises(ModelError, match=rf"{parts[1].name} is not beside it"):
            GGUFSource(NoOptions(), ModelSourceContext(str(parts[2]), tmp_path)).check()

    def test_parts_of_two_models_are_named(self, parts: list[Path], tmp_path: Path) -> None:
        parts[2].write_bytes(parts[1].read_bytes())
        with pytest.raises(
            ModelError, match=rf"{parts[2].name} should be part 3 of {len(parts)}, and says .* part 2 of"
        ):
            convert_gguf(parts[0], tmp_path / "cache")

    def test_a_part_under_another_name_is_named(self, parts: list[Path], tmp_path: Path) -> None:
        parts[0].rename(tmp_path / "renamed.gguf")
        with pytest.raises(ModelError, match=rf"part 1 of a model in {len(parts)} files .*renamed-00001-of-"):
            convert_gguf(tmp_path / "renamed.gguf", tmp_path / "cache")


def test_tokenizer_round_trip(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, "llama")
    write_gguf(tmp_path / "model.gguf", checkpoint, "llama")
    ours = Tokenizer.from_directory(convert_gguf(tmp_path / "model.gguf", tmp_path / "cache"))
    original = Tokenizer.from_directory(checkpoint)
    for text in STRINGS:
        assert ours.encode(text) == original.encode(text)
        assert ours.decode(ours.encode(text)) == original.decode(original.encode(text))
    assert ours.apply_chat_template([]) == "0"
    assert ours.eos_token_ids == {2}
    assert (ours.named_tokens["bos_token"], ours.named_tokens["eos_token"]) == ("<|endoftext|>", "<|im_end|>")


def test_quantised_tensors_are_dequantised(tmp_path: Path) -> None:
    tensors = write_gguf(tmp_path / "q.gguf", tiny_checkpoint(tmp_path, "llama"), "llama", kind="Q8_0")
    found = converted_tensors(convert_gguf(tmp_path / "q.gguf", tmp_path / "cache"))
    for name, tensor in tensors.items():
        assert found[name].dtype == np.float32
        # Q8_0 keeps 8 bits of a block's largest weight.
        np.testing.assert_allclose(found[name], tensor, atol=np.abs(tensor).max() / 127, err_msg=name)


@pytest.mark.parametrize(("kind", "dtype"), [("Q4_0", np.uint8), ("Q8_0", np.int8)])
def test_codes_are_kept_where_a_server_is_started(kind: str, dtype: type, tmp_path: Path) -> None:
    """And mean what the gguf package says, to the bit; a block of zeros, whose scale is 0, too."""
    checkpoint = tiny_checkpoint(tmp_path, "llama", hidden_size=64, num_attention_heads=4)
    write_gguf(tmp_path / "q.gguf", checkpoint, "llama", kind=kind, zeros="model.layers.0.mlp.up_proj.weight")
    plain = converted_tensors(convert_gguf(tmp_path / "q.gguf", tmp_path / "cache"))
    source = GGUFSource(NoOptions(), ModelSourceContext(str(tmp_path / "q.gguf"), tmp_path / "cache"))
    directory = source.prepare()
    weights = KeptCodes(NoOptions(), FormatContext({"quant_method": "pegboard"}, slots_of(directory)))
    matrices = weights.matrices()
    assert matrices.keys() == {name for name, tensor in plain.items() if tensor.ndim == 2}
    for name, matrix in matrices.items():
        matrix.check()
        found = torch.empty(matrix.shape)
        matrix.fill(found)
        np.testing.assert_array_equal(found.numpy(), plain[name], err_msg=name)
        assert load_file(directory / "model.safetensors")[matrix.codes.name].dtype == dtype
    assert json.loads((directory / "config.json").read_text("utf-8"))["quantization_config"] == QUANTIZATION


def test_other_kinds_become_numbers(tmp_path: Path) -> None:
    write_gguf(tmp_path / "q.gguf", tiny_checkpoint(tmp_path, "llama"), "llama", kind="Q4_1")
    source = GGUFSource(NoOptions(), ModelSourceContext(str(tmp_path / "q.gguf"), tmp_path / "cache"))
    assert {tensor.dtype for tensor in converted_tensors(source.prepare()).values()} == {np.dtype(np.float32)}
    assert "quantization_config" not in json.loads((source.prepare() / "config.json").read_text("utf-8"))


@pytest.mark.parametrize(
    ("kind", "expected"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")]
)
def test_the_config_tells_the_models_precision(tmp_path: Path, kind: str, expected: str) -> None:
    """Weights are always stored as float32, which would say nothing of the model."""
    write_gguf(tmp_path / "model.gguf", tiny_checkpoint(tmp_path, "llama"), "llama", kind=kind)
    directory = convert_gguf(tmp_path / "model.gguf", tmp_path / "cache")
    assert json.loads((directory / "config.json").read_text("utf-8"))["torch_dtype"] == expected
    assert {tensor.dtype for tensor in converted_tensors(directory).values()} == {np.dtype(np.float32)}


def test_shards_bound_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_weights, "SHARD_BYTES", 100_000)
    tensors = write_gguf(tmp_path / "model.gguf", tiny_checkpoint(tmp_path, "llama"), "llama")
    directory = convert_gguf(tmp_path / "model.gguf", tmp_path / "cache")
    index = json.loads((directory / "model.safetensors.index.json").read_text("utf-8"))["weight_map"]
    assert index.keys() == tensors.keys()
    assert len(set(index.values())) > 3
    assert set(index.values()) == {file.name for file in directory.glob("*.safetensors")}


def test_unpermute_undoes_llama_cpp() -> None:
    weight = np.random.default_rng(0).normal(size=(48, 5)).astype(np.float32)
    np.testing.assert_array_equal(unpermute(permute(weight, 3), 3), weight)
    np.testing.assert_array_equal(unpermute(permute(weight[:, 0], 3), 3), weight[:, 0])


def test_names() -> None:
    assert hf_name("blk.12.attn_q_norm.weight") == "model.layers.12.self_attn.q_norm.weight"
    assert hf_name("output.weight") == "lm_head.weight"
    assert hf_name("blk.0.ffn_gate_exps.weight") is None
    assert hf_name("something") is None


def test_found_again_by_content(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, "llama")
    first, second = tmp_path / "a.gguf", tmp_path / "elsewhere.gguf"
    write_gguf(first, checkpoint, "llama")
    second.write_bytes(first.read_bytes())
    directory = convert_gguf(first, tmp_path / "cache")
    stamp = (directory / "config.json").stat().st_mtime_ns
    assert convert_gguf(second, tmp_path / "cache") == directory
    assert (directory / "config.json").stat().st_mtime_ns == stamp
    write_gguf(second, tiny_checkpoint(tmp_path, "llama", seed=1), "llama")
    assert convert_gguf(second, tmp_path / "cache") != directory


def test_a_new_converter_version_converts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_checkpoint(tmp_path, "llama"), "llama")
    old = convert_gguf(tmp_path / "model.gguf", tmp_path / "cache")
    monkeypatch.setattr(gguf_convert, "CONVERTER_VERSION", gguf_convert.CONVERTER_VERSION + 1)
    assert convert_gguf(tmp_path / "model.gguf", tmp_path / "cache") != old


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_checkpoint(tmp_path, "llama"), "llama")

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(gguf_weights, "write_weights", fail)
        with pytest.raises(ModelError, match=r"No space left .*PEGBOARD_CACHE"):
            convert_gguf(tmp_path / "model.gguf", tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache" / "gguf").iterdir() if path.is_dir()]
    assert (convert_gguf(tmp_path / "model.gguf", tmp_path / "cache") / "config.json").is_file()


def _die_midway(file: Path, cache: Path) -> None:
    gguf_convert.write_json = lambda *args: os._exit(9)
    convert_gguf(file, cache)


def _convert(file: Path, cache: Path, results: Any) -> None:
    results.put(str(convert_gguf(file, cache)))


def test_a_killed_conversion_is_cleaned_up_and_done_again(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_checkpoint(tmp_path, "llama"), "llama")
    process = multiprocessing.get_context("spawn").Process(
        target=_die_midway, args=(tmp_path / "model.gguf", tmp_path / "cache")
    )
    process.start()
    process.join()
    assert process.exitcode == 9
    root = tmp_path / "cache" / "gguf"
    assert len([path for path in root.iterdir() if path.is_dir()]) == 1
    directory = convert_gguf(tmp_path / "model.gguf", tmp_path / "cache")
    assert [path for path in root.iterdir() if path.is_dir()] == [directory]
    assert (directory / "config.json").is_file()


def test_concurrent_starters_share_one_conversion(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_checkpoint(tmp_path, "llama"), "llama")
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    args = (tmp_path / "model.gguf", tmp_path / "cache", results)
    processes = [spawn.Process(target=_convert, args=args) for _ in range(3)]
    for process in processes:
        process.start()
    found = {results.get(timeout=120) for _ in processes}
    for process in processes:
        process.join()
    assert len(found) == 1
    assert len([path for path in (tmp_path / "cache" / "gguf").iterdir() if path.is_dir()]) == 1


@pytest.mark.parametrize(
    ("architecture", "extra", "message"),
    [
        ("falcon", {}, "architecture 'falcon' is not supported; supported: llama, qwen2, qwen3"),
        ("llama", {"llama__expert_count": (8, gguf.GGUFValueType.UINT32)}, "mixtures of experts"),
        ("llama", {"llama__rope__dimension_count": (8, gguf.GGUFValueType.UINT32)}, "partial rotary"),
        (
            "llama",
            {
                "llama__rope__scaling__type": ("longrope", gguf.GGUFValueType.STRING),
                "llama__rope__scaling__factor": (2.0, gguf.GGUFValueType.FLOAT32),
            },
            "rope scaling 'longrope'",
        ),
    ],
)
def test_what_is_not_supported_is_named(architecture: str, extra: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_checkpoint(tmp_path, "llama"), architecture, **extra)
    with pytest.raises(ModelError, match=message):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "cache")


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no such GGUF file: .*nothing\.gguf"):
        convert_gguf(tmp_path / "nothing.gguf", tmp_path)
    broken = tmp_path / "broken.gguf"
    for content in (b"", b"nonsense" * 20, b"GGUF\x03\x00\x00\x00" + b"\xff" * 40):
        broken.write_bytes(content)
        with pytest.raises(ModelError, match=r"broken\.gguf is not a readable GGUF file"):
            convert_gguf(broken, tmp_path)


def test_llama3_rope_is_recovered_from_its_factors(tmp_path: Path) -> None:
    from pegboard.plugins.model_sources.gguf.metadata import _llama3_scaling
    from pegboard.toolkit.model.rope import inverse_frequencies
    from pegboard.toolkit.model.rope_spec import rope_from_config

    parameters = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    }
    scaled = inverse_frequencies(rope_from_config({"rope_parameters": parameters}, 64, 131072)).double()
    plain = inverse_frequencies(rope_from_config({"rope_theta": 500000.0}, 64, 131072)).double()

    class Factors:
        path = "x.gguf"

        def dequantized(self, name: str) -> Any:
            return (plain / scaled).float().numpy()

    found = _llama3_scaling(Factors(), 64, 500000.0)  # type: ignore[arg-type]
    assert {**found, "rope_theta": 500000.0} == parameters
    with pytest.raises(ModelError, match=r"not those of Llama 3\.1"):
        _llama3_scaling(Factors(), 64, 10000.0)  # type: ignore[arg-type]


def test_sentencepiece_vocabularies(tmp_path: Path) -> None:
    """Merges follow the scores, bytes stand in for unknown characters, and a bos token comes first by default."""
    from pegboard.plugins.model_sources.gguf.tokenizer import write_tokenizer

    words = ["▁", "a", "b", "ab", "▁a", "▁ab", "ba"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    scores = [0.0] * 259 + [-10.0, -11.0, -12.0, -1.0, -2.0, -3.0, -4.0]

    class File:
        path = "spm.gguf"
        values: dict[str, Any] = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(words)],
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        }

        def get(self, key: str) -> Any:
            return self.values.get(key)

        def need(self, key: str, kind: type) -> Any:
            return self.values[key]

        def need_int(self, key: str) -> int:
            return 4096

    write_tokenizer(File(), tmp_path)  # type: ignore[arg-type]
    tokenizer = Tokenizer.from_directory(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    assert backend.encode("ab ba").tokens == ["<s>", "▁ab", "▁", "ba"]
    assert backend.encode("aé").tokens == ["<s>", "▁a", "<0xC3>", "<0xA9>"]
    for text in ("ab ba", " ab", "é漢 a\n", "a  b"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
