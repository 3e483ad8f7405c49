"""Chunks that are written from a template are those that would be written in full, byte for byte."""

from __future__ import annotations

import asyncio
import functools
import re
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pegboard.conformance.asgi import call
from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.plugins.api_openai.chat_answers import ChatWriter
from pegboard.plugins.api_openai.completions import CompletionWriter
from pegboard.plugins.api_openai.writer import Template
from pegboard.plugins.parsers_reasoning.options import ThinkOptions
from pegboard.plugins.parsers_reasoning.parsers import ThinkParser
from pegboard.toolkit.http.events import event
from pegboard.toolkit.parsing.output_parser import OutputParserContext
from tests.plugins.api_openai.asking import CHAT, COMPLETIONS, MESSAGES, make_app

HARD = "\u2028\u2029\0\x1f\x7f\"\\/\ufeff\ufffd漢🙂\u200d<>&'\r\n\t "
TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(HARD), min_size=1, max_size=9)


@functools.cache
def served(thinks: bool) -> tuple[Any, FakeEngineClient]:
    client = FakeEngineClient()
    options = OutputParserContext(chat_template="", architecture="", model="")
    parser = ThinkParser(ThinkOptions(), options) if thinks else None
    return make_app(client, services={"reasoning_parser": parser}), client


def streamed(path: str, body: dict[str, Any], script: list[str], thinks: bool, *, in_full: bool) -> bytes:
    """What a stream of this script is, with templates or in full."""
    app, client = served(thinks)
    client.script = tuple(script)
    writer = ChatWriter if path == CHAT else CompletionWriter
    asked = {"stream": True, "rid": "some-id", **body}

    async def scene() -> bytes:
        done = await call(app, "POST", path, asked)
        assert done.status == 200, done.body
        return bytes(done.body)

    if not in_full:
        return asyncio.run(scene())
    with mock.patch.object(writer, "plain", return_value=None):
        return asyncio.run(scene())


def same(path: str, body: dict[str, Any], script: list[str], thinks: bool = False) -> bytes:
    found, full = (
        re.sub(rb'"created":\d+', b'"created":1', streamed(path, body, script, thinks, in_full=in_full))
        for in_full in (False, True)
    )
    assert found == full
    return found


MORE: list[dict[str, Any]] = [
    {},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"rid": '\0"\0'},
    {"rid": "\0"},
]


@settings(deadline=None, max_examples=15)
@example(script=list(HARD), more={})
@given(script=st.lists(TEXTS, min_size=1, max_size=6), more=st.sampled_from(MORE))
def test_completions(script: list[str], more: dict[str, Any]) -> None:
    same(COMPLETIONS, {"prompt": "Hi", **more}, script)


@settings(deadline=None, max_examples=15)
@example(script=list(HARD), more={})
@given(script=st.lists(TEXTS, min_size=1, max_size=6), more=st.sampled_from(MORE))
def test_chats(script: list[str], more: dict[str, Any]) -> None:
    same(CHAT, {"messages": MESSAGES, **more}, script)


@settings(deadline=None, max_examples=15)
@given(cuts=st.lists(st.integers(1, 5), max_size=12), separate=st.booleans())
def test_thoughts(cuts: list[int], separate: bool) -> None:
    text, script = "<think>let me\u2028 see</think>\n\nsome <answer>", []  # type: ignore[var-annotated]
    for cut in cuts:
        script, text = [*script, text[:cut]], text[cut:]
    body = {"messages": MESSAGES, "separate_reasoning": separate}
    same(CHAT, body, [one for one in [*script, text] if one], thinks=True)


@pytest.mark.parametrize("more", [{"echo": True}, {"logprobs": 1}, {"n": 3, "seed": 1}, {"echo": True, "logprobs": 0}])
def test_completions_that_want_more(more: dict[str, Any]) -> None:
    assert same(COMPLETIONS, {"prompt": "Hi", **more}, ["a", '"', "c"]).count(b"data: ") > 3


@pytest.mark.parametrize("more", [{"logprobs": True}, {"logprobs": True, "top_logprobs": 1}, {"n": 2}])
def test_chats_that_want_more(more: dict[str, Any]) -> None:
    assert same(CHAT, {"messages": MESSAGES, **more}, ["a", '"', "c"]).count(b"data: ") > 3


def test_templates_are_used() -> None:
    """Else the tests above say nothing."""
    with mock.patch.object(Template, "fill", side_effect=AssertionError("used")):
        for path, body in ((COMPLETIONS, {"prompt": "Hi"}), (CHAT, {"messages": MESSAGES})):
            assert b"internal error" in streamed(path, body, ["a", "b", "c"], False, in_full=False)


@given(constant=st.text('\0"a', max_size=5), text=TEXTS)
def test_a_template_is_filled_where_its_text_stands(constant: str, text: str) -> None:
    def write(one: str) -> bytes:
        return event({"id": constant, constant or "key": [one], "end": constant})

    assert Template(write).fill(text) == write(text)


def test_what_json_cannot_say_is_refused_alike() -> None:
    template = Template(lambda text: event({"text": text}))
    for write in (template.fill, msgspec.json.encode):
        with pytest.raises(UnicodeEncodeError):
            write("\ud800")
