"""The tokenizer agrees with transformers' AutoTokenizer, and stays small."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.conformance.checkpoints import write_tiny_tokenizer
from pegboard.core.interfaces.errors import InvalidRequest, ModelError
from pegboard.core.interfaces.tokenizer import Tokenizer as TokenizerContract
from pegboard.toolkit.text.tokenizer import Tokenizer
from tests.toolkit.text.demo import CHATS, STRINGS, demo_directory


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    write_tiny_tokenizer(tmp_path)
    return tmp_path


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **changes}), encoding="utf-8")


def oracle(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


DEMO = functools.cache(lambda: (Tokenizer.from_directory(demo_directory()), oracle(demo_directory())))


def assert_same(directory: Path, strings: tuple[str, ...] = STRINGS) -> None:
    ours, theirs = Tokenizer.from_directory(directory), oracle(directory)
    for text in strings:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.special_ids == set(theirs.all_special_ids) | {
        i for i, token in theirs.added_tokens_decoder.items() if token.special
    }
    named = ours.named_tokens
    assert (named.get("bos_token"), named.get("eos_token")) == (theirs.bos_token, theirs.eos_token)
    assert ours.vocab_size == len(theirs)


def test_satisfies_the_contract(tiny: Path) -> None:
    tokenizer: TokenizerContract = Tokenizer.from_directory(tiny)
    assert tokenizer.vocab_size == 320
    assert tokenizer.id_to_token(1) == "<|im_start|>"
    assert tokenizer.id_to_token(-1) is None
    assert tokenizer.id_to_token(10**6) is None


def test_tiny_equals_transformers(tiny: Path) -> None:
    assert_same(tiny)


def test_demo_equals_transformers() -> None:
    directory = demo_directory()
    assert_same(directory)
    ours, theirs = Tokenizer.from_directory(directory), oracle(directory)
    assert ours.eos_token_ids == {2}
    for chat in CHATS:
        for prompt in (True, False):
            text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
            assert ours.apply_chat_template(chat, add_generation_prompt=prompt) == text
            ids = theirs.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)
            assert ours.encode(text, add_special_tokens=False) == ids


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_equals_transformers(text: str) -> None:
    ours, theirs = DEMO()
    ids = theirs.encode(text)
    assert ours.encode(text) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False},
        {"additional_special_tokens": ["<|im_start|>", "<new>"]},
        {"extra_special_tokens": {"image_token": "<image>"}},
        {"added_tokens_decoder": {"320": {"content": "<tool>", "special": False, "normalized": False}}},
        {"bos_token": {"content": "<|im_start|>", "special": True, "__type": "AddedToken"}},
        {"unk_token": "<unk>"},
    ],
    ids=str,
)
def test_config_options_equal_transformers(tiny: Path, changes: dict[str, Any]) -> None:
    edit_config(tiny, **changes)
    assert_same(tiny, (*STRINGS, "a <new> b", "<image>", "x<tool>y", "<unk>"))


def test_eos_ids_come_from_all_files(tiny: Path) -> None:
    (tiny / "generation_config.json").write_text('{"eos_token_id": [5, 6]}', encoding="utf-8")
    (tiny / "config.json").write_text('{"eos_token_id": 7, "text_config": {"eos_token_id": 8}}', encoding="utf-8")
    assert Tokenizer.from_directory(tiny).eos_token_ids == {2, 5, 6, 7, 8}


def test_batch_decoding(tiny: Path) -> None:
    tokenizer = Tokenizer.from_directory(tiny)
    texts = ["one", "two 漢", ""]
    assert tokenizer.decode_batch([tokenizer.encode(text) for text in texts]) == texts


def test_truncation_and_padding_in_the_file_are_ignored(tiny: Path) -> None:
    file = tiny / "tokenizer.json"
    content = json.loads(file.read_text("utf-8"))
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(content), encoding="utf-8")
    assert len(Tokenizer.from_directory(tiny).encode("a b c d e f g h i j")) > 4


def test_named_templates(tiny: Path) -> None:
    edit_config(
        tiny,
        chat_template=[
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "{{ tools | length }}"},
        ],
    )
    tokenizer = Tokenizer.from_directory(tiny)
    assert tokenizer.apply_chat_template([]) == "plain"
    assert tokenizer.apply_chat_template([], tools=[{"type": "function"}]) == "1"
    assert tokenizer.apply_chat_template([], template="tool_use", tools=[]) == "0"
    with pytest.raises(InvalidRequest, match="no chat template named 'rag'; this model has: default, tool_use"):
        tokenizer.apply_chat_template([], template="rag")


def test_template_files_override_the_config(tiny: Path) -> None:
    (tiny / "chat_template.jinja").write_text("from file {{ bos_token }}", encoding="utf-8")
    (tiny / "additional_chat_templates").mkdir()
    (tiny / "additional_chat_templates" / "rag.jinja").write_text("rag", encoding="utf-8")
    tokenizer = Tokenizer.from_directory(tiny)
    assert tokenizer.apply_chat_template([]) == "from file <|endoftext|>"
    assert tokenizer.apply_chat_template([], template="rag") == "rag"


def test_the_file_that_processors_had(tiny: Path) -> None:
    (tiny / "chat_template.json").write_text('{"chat_template": "of the processor"}', encoding="utf-8")
    assert Tokenizer.from_directory(tiny).apply_chat_template([]) == "of the processor"
    (tiny / "chat_template.json").write_text('{"chat_template": {"default": "a", "rag": "b"}}', encoding="utf-8")
    assert Tokenizer.from_directory(tiny).apply_chat_template([], template="rag") == "b"
    (tiny / "chat_template.jinja").write_text("newer", encoding="utf-8")
    assert Tokenizer.from_directory(tiny).apply_chat_template([]) == "newer"
    (tiny / "chat_template.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ModelError, match=r"chat_template\.json must hold a JSON object"):
        Tokenizer.from_directory(tiny)


def test_without_a_template_chats_are_refused(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, chat_template=None)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template") as raised:
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert raised.value.status == 400


def test_lone_surrogates_are_refused(tiny: Path) -> None:
    with pytest.raises(InvalidRequest, match="surrogates"):
        Tokenizer.from_directory(tiny).encode("a\ud800b")


def test_broken_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match="cannot be read as a tokenizer"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[", encoding="utf-8")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_directory(tmp_path)


def test_needs_neither_torch_nor_much_memory() -> None:
    code = (
        "import sys, psutil\n"
        "from pegboard.toolkit.text.tokenizer import Tokenizer\n"
        "from pegboard.toolkit.text.detokenize import IncrementalDetokenizer\n"
        f"t = Tokenizer.from_directory({str(demo_directory())!r})\n"
        "t.apply_chat_template([{'role': 'user', 'content': 'hi'}])\n"
        "assert len(t.encode('word ' * 20000)) > 20000\n"
        "heavy = {'torch', 'transformers', 'numpy'} & sys.modules.keys()\n"
        "print(heavy or 'light', psutil.Process().memory_info().rss // 2**20)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert out[0] == "light"
    assert int(out[1]) < 120, "MiB resident; the API process has 200 MB for everything"
