"""Whatever stands where a picture should: served or refused with its place, in each API, and never an error of ours."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.asgi import call
from pegboard.conformance.fake_client import FakeEngineClient, FakeTokenizer
from pegboard.conformance.properties import properties
from pegboard.conformance.rig.fake_media import fake_processor
from tests.toolkit.chat.media_chats import address, encoded
from tests.toolkit.chat.templates import TOOLS_AND_PARTS
from tests.toolkit.chat.text_corpus import make_app

_PLAIN = st.sampled_from(
    (None, True, 0, -1, 1.5, 1e300, 2**70, "", "x", "auto", "text", "image", "base64", "url", "image/png", "<|image|>")
)
_ADDRESS = st.sampled_from(
    (address(1), address(2, "video"), encoded(3), "http://a/b", "data:", "data:;base64,", "file:///")
)
_VALUE = st.recursive(
    _PLAIN | _ADDRESS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(("url", "x")), inner)
)
_NAMES = (
    *("image_url", "video_url", "text", "detail", "min_pixels", "max_pixels", "fps", "num_frames", "file_id", "source"),
    *("content", "tool_use_id", "transformations"),
)
_TYPES = st.sampled_from(
    ("image_url", "video_url", "input_image", "input_video", "image", "text", "input_text", "refusal", "tool_result")
)
_SOURCE = st.fixed_dictionaries(
    {}, optional={"type": _PLAIN, "media_type": _PLAIN, "data": _VALUE, "url": _VALUE, "file_id": _PLAIN}
)
_PART = st.fixed_dictionaries(
    {"type": _TYPES | _VALUE}, optional={name: _VALUE | (_SOURCE if name == "source" else _ADDRESS) for name in _NAMES}
)
_COUNTS = st.lists(st.sampled_from((1, 2, 3, 0, -1, 2**70, 2**31 - 1, 1.0, "1")), max_size=3) | _PLAIN
_ENCODED = st.fixed_dictionaries(
    {"states": st.sampled_from(("AAAAAAAAAAA=", "AAB/f38=")) | _VALUE, "grid": st.just([1, 1, 2]) | _COUNTS},
    optional={
        "format": st.sampled_from(("raw", "safetensors")) | _PLAIN,
        "dtype": st.sampled_from(("float32", "bfloat16")) | _PLAIN,
        "shape": st.just([2, 1]) | _COUNTS,
        "times": _COUNTS,
        "x": _PLAIN,
    },
)
_CONTENT = st.lists(_PART | _VALUE, max_size=3)


def body(api: str, content: Any) -> tuple[str, dict[str, Any]]:
    message = {"role": "user", "content": content}
    if api == "chat":
        return "/v1/chat/completions", {"messages": [message]}
    if api == "responses":
        call_of = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        told = {"type": "function_call_output", "call_id": "c", "output": content}
        return "/v1/responses", {"input": [message, call_of, told]}
    return "/v1/messages", {"model": "fake-model", "max_tokens": 5, "messages": [message]}


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_contents(api: str) -> None:
    tokenizer = FakeTokenizer(template=TOOLS_AND_PARTS)
    app = make_app(FakeEngineClient(tokenizer=tokenizer, media=fake_processor()))

    @properties(150)
    @given(_CONTENT)
    def check(content: Any) -> None:
        path, asked = body(api, content)
        done = asyncio.run(call(app, "POST", path, asked))
        assert done.status in (200, 400), (done.status, done.body)
        if done.status == 400:
            error = done.json()["error"]
            assert error["message"]
            assert error.get("param") or error["details"]["param"]

    check()


def test_raw_prompts() -> None:
    app = make_app(FakeEngineClient(media=fake_processor()))
    one = _ADDRESS | _VALUE | _ENCODED
    data = one | st.lists(one, max_size=3)

    @properties(150)
    @given(st.sampled_from(("<|image|>", "<|image|><|video|>", "a", ["<|image|>", "a"])), data, data, _VALUE)
    def check(text: Any, images: Any, videos: Any, settings: Any) -> None:
        asked = {"text": text, "image_data": images, "video_data": videos, "mm_processor_kwargs": settings}
        done = asyncio.run(call(app, "POST", "/generate", asked))
        assert done.status in (200, 400), (done.status, done.body)

    check()
