"""Which tokens of an answer are content, of a model with tokens of several characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pegboard.core.registry.registry import Registry
from pegboard.plugins.api_openai.responses.content_logprobs import TextByToken
from pegboard.plugins.api_openai.responses.output import Output
from pegboard.toolkit.chat.tool_calls import ChatStream, Tools
from pegboard.toolkit.parsing.output_parser import OutputParserContext


class Words:
    """A tokenizer of these tokens; the special one has no text where special tokens are left out."""

    special_ids = frozenset({0})

    def __init__(self, *words: bytes) -> None:
        self._words = (b"<s>", *words)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self._words[one] for one in ids if one not in skipped).decode("utf-8", "replace")

    def id_to_token(self, token_id: int) -> str | None:
        return repr(self._words[token_id])


def parsers(*names: tuple[str, str]) -> list[Any]:
    found = [Registry.discover().get(*name) for name in names]
    return [one.load()(one.options_model()(), OutputParserContext("", "", "")) for one in found if one is not None]


def content_of(words: Sequence[bytes], pieces: Sequence[str], ids: Sequence[Sequence[int]]) -> list[list[str]]:
    """Return the tokens of each message of an answer that comes in such pieces, with the tokens of each."""
    reasoning, calls = parsers(("reasoning_parser", "deepseek_r1"), ("tool_parser", "hermes"))
    stream = ChatStream(tools=Tools(({"name": "now"},)), tool_parser=calls, reasoning_parser=reasoning)
    output, tokens = Output(stream), TextByToken(Words(*words), skip_special_tokens=True)
    for text, some in zip(pieces, ids, strict=True):
        output.feed_tokens(tokens.feed(text, some, [{"token": one} for one in some]))
    output.feed_tokens(tokens.finish())
    output.feed(tokens.rest())
    output.finish(complete=True)
    messages = [one["content"][0] for one in output.items if one["type"] == "message"]
    return [[repr(words[one["token"] - 1])[2:-1] for one in part["logprobs"]] for part in messages]


THOUGHT = (b"<think>", b"Hm", b".", b"</think>", b"\n\n", b"Four", b".")
CALL = (b"Look", b":", b" ", b"<tool_call>", b'{"name"', b': "now"}', b"</tool_call>", b"\n", b"Done", b"<", b"!")


@pytest.mark.parametrize(
    ("words", "expected"), [(THOUGHT, [["Four", "."]]), (CALL, [["Look", ":"], ["\\n", "Done", "<", "!"]])]
)
def test_whole_and_a_token_at_a_time(words: Sequence[bytes], expected: list[list[str]]) -> None:
    ids, texts = list(range(1, len(words) + 1)), [one.decode() for one in words]
    assert content_of(words, ["".join(texts)], [[0, *ids]]) == expected
    assert content_of(words, ["", *texts], [[0], *([one] for one in ids)]) == expected
    # Text may come later than its tokens.
    assert content_of(words, ["", "".join(texts)[:9], "".join(texts)[9:]], [[0], ids, []]) == expected


def test_a_character_of_several_tokens_has_them_all() -> None:
    words = ("é".encode()[:1], "é".encode()[1:], b"!")
    assert content_of(words, ["é!"], [[1, 2, 3]]) == [["\\xc3", "\\xa9", "!"]]


def test_a_token_that_a_stop_string_has_cut_counts_and_the_next_do_not() -> None:
    words = (b"Four", b".STOP", b" more")
    assert content_of(words, ["Four."], [[1, 2, 3]]) == [["Four", ".STOP"]]
