"""Pictures and videos of /generate, on a scripted engine that reads toy media."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import numpy as np
import pytest

from pegboard.conformance.asgi import Exchange, call
from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.conformance.fakes import session_store
from pegboard.conformance.rig.fake_media import FIRST_ID, fake_processor
from pegboard.core.interfaces.api_router import ApiContext
from pegboard.plugins.api_native.options import NativeOptions
from pegboard.plugins.api_native.router import NativeRouter
from pegboard.toolkit.http.app import build_app
from pegboard.toolkit.media.inputs import EncodedForm, MediaPrompt, MediaSettings
from tests.toolkit.chat.media_chats import address, encoded, picture

WEB = {"https://example.org/1": picture(1)}
IMAGE, VIDEO = FIRST_ID + 1, FIRST_ID + 2


def ask(**body: Any) -> tuple[Exchange, FakeEngineClient]:
    async def scene() -> tuple[Exchange, FakeEngineClient]:
        client = FakeEngineClient(media=fake_processor(), web=WEB)
        sessions = session_store()
        if "session_params" in body:
            body["session_params"] = {"id": sessions.open()}
        ctx = ApiContext(client=client, max_body_bytes=10**6, services={"session_store": sessions})
        app = build_app([("native", NativeRouter(NativeOptions(health_timeout=1), ctx))], max_body_bytes=10**6)
        return await call(app, "POST", "/generate", body), client

    return asyncio.run(scene())


def generated(**body: Any) -> tuple[Any, FakeEngineClient]:
    done, client = ask(**body)
    assert done.status == 200, done.body
    return done.json(), client


def bound(client: FakeEngineClient) -> list[tuple[bytes, ...]]:
    """The items of each request."""
    return [one.data for one in client.laid_out]


@pytest.mark.parametrize("one", [address(1), encoded(1), "https://example.org/1"], ids=["data", "base64", "fetched"])
def test_a_picture_and_where_the_client_has_put_it(one: str) -> None:
    for prompt in ({"text": "a<|image|>b"}, {"input_ids": [97, IMAGE, 98]}):
        for data in (one, [one]):
            answer, client = generated(image_data=data, **prompt)
            assert bound(client) == [(picture(1),)]
            assert client.laid_out[0].text == "a" + chr(IMAGE) * 6 + "b"
            assert answer["meta_info"]["prompt_tokens"] == 8
            assert answer["meta_info"]["image_tokens"] == 6
            assert "video_tokens" not in answer["meta_info"]


def test_pictures_go_before_videos() -> None:
    text = "<|image|>x<|image|><|video|>"
    answer, client = generated(text=text, image_data=[encoded(1), encoded(2)], video_data=encoded(3, "video"))
    assert bound(client) == [(picture(1), picture(2), picture(3, "video"))]
    assert (answer["meta_info"]["image_tokens"], answer["meta_info"]["video_tokens"]) == (12, 8)
    done, _ = ask(text="<|video|><|image|>", image_data=encoded(1), video_data=encoded(3, "video"))
    assert done.status == 400


def test_batches() -> None:
    texts = ["<|image|>", "<|image|><|image|>", "none"]
    data: list[Any] = [encoded(1), [encoded(2), encoded(3)], None]
    answers, client = generated(text=texts, image_data=data, sampling_params={"n": 2})
    assert len(answers) == 6
    expected = [(picture(1),), (picture(2), picture(3))]
    assert bound(client) == [expected[0]] * 2 + [expected[1]] * 2
    assert [one.prompt for one in client.requests[4:]] == ["none"] * 2
    _, client = generated(text=["<|image|>"] * 2, image_data=encoded(5))
    assert bound(client) == [(picture(5),)] * 2
    ids = [[IMAGE], [VIDEO]]
    _, client = generated(input_ids=ids, image_data=[encoded(1), None], video_data=[[], encoded(2, "video")])
    assert bound(client) == [(picture(1),), (picture(2, "video"),)]


def test_streams() -> None:
    done, client = ask(text="<|image|>", image_data=encoded(1), stream=True)
    *events, last = done.events()
    assert last == "[DONE]"
    assert {json.loads(one)["meta_info"]["image_tokens"] for one in events} == {6}
    assert bound(client) == [(picture(1),)]


def test_settings() -> None:
    settings = {"min_pixels": 2, "max_pixels": 50, "fps": 2.5}
    _, client = generated(
        text="<|image|><|video|>", image_data=encoded(1), video_data=encoded(2, "video"), mm_processor_kwargs=settings
    )
    prompt = client.requests[0].prompt
    assert isinstance(prompt, MediaPrompt)
    assert [one.settings for one in prompt.media] == [
        MediaSettings(min_pixels=2, max_pixels=50),
        MediaSettings(min_pixels=2, max_pixels=50, fps=2.5),
    ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": "<|image|>", "image_data": "%%%"}, "image_data"),
        ({"text": "<|image|>", "image_data": ["aGk="]}, "image_data.0"),
        ({"text": "<|image|>", "image_data": [[encoded(1)]]}, "image_data"),
        ({"text": "<|image|>", "image_data": [{"url": "x"}]}, "image_data.0"),
        ({"text": "<|image|>", "image_data": 5}, "image_data"),
        ({"text": "<|video|>", "video_data": ["https://example.org/404"]}, "video_data.0"),
        ({"text": ["<|image|>"] * 2, "image_data": [encoded(1)]}, "image_data"),
        ({"text": ["<|image|>", "<|image|>"], "image_data": [encoded(1), ["aGk="]]}, "image_data.1.0"),
        ({"text": "<|image|>", "image_data": encoded(1), "mm_processor_kwargs": {"x": 1}}, "mm_processor_kwargs"),
        ({"text": "<|image|>", "image_data": encoded(1), "session_params": {}}, "session_params"),
        ({"text": "a", "audio_data": "x"}, "audio_data"),
    ],
)
def test_errors_name_the_place(body: dict[str, Any], param: str) -> None:
    done, client = ask(**body)
    assert done.status == 400, done.body
    assert done.json()["error"]["param"] == param, done.body
    assert client.finished == []


@pytest.mark.parametrize("text", ["a", "<|image|><|image|>", "<|video|>"])
def test_placeholders_and_pictures_must_match(text: str) -> None:
    done, client = ask(text=text, image_data=encoded(1))
    assert (done.status, done.json()["error"]["code"]) == (400, "media_mismatch")
    assert client.laid_out == []


def states(rows: int = 6, width: int = 8) -> dict[str, Any]:
    data = np.arange(rows * width, dtype="<f4").tobytes()
    where = {"format": "raw", "dtype": "float32", "shape": [rows, width], "grid": [1, 2, 3]}
    return {"states": base64.b64encode(data).decode(), **where}


def test_states_in_place_of_pictures() -> None:
    several = [states(), encoded(1), {**states(), "grid": [1, 3, 2]}]
    answer, client = generated(text="<|image|>a<|image|><|image|>", image_data=several)
    assert answer["meta_info"]["image_tokens"] == 18
    (prompt,) = [one.prompt for one in client.laid_out]
    assert [one.encoded for one in prompt.media] == [
        EncodedForm(grid=(1, 2, 3), format="raw", dtype="float32", shape=(6, 8)),
        None,
        EncodedForm(grid=(1, 3, 2), format="raw", dtype="float32", shape=(6, 8)),
    ]
    for data in (states(), [states()]):
        _, client = generated(text="<|image|>", image_data=data)
        assert bound(client) == [(np.arange(48, dtype="<f4").tobytes(),)]
    video = {**states(12), "grid": [2, 2, 3], "times": [0, 0.5]}
    answer, client = generated(text=["<|video|>"] * 2, video_data=[video, [video]])
    assert [one["meta_info"]["video_tokens"] for one in answer] == [12] * 2
    assert client.laid_out[0].prompt.media[0].encoded == EncodedForm(
        grid=(2, 2, 3), times=(0.0, 0.5), format="raw", dtype="float32", shape=(12, 8)
    )


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"grid": None}, "image_data", "grid"),
        ({"grid": [1, 2]}, "image_data", "length"),
        ({"grid": [1, 2, "3"]}, "image_data", "int"),
        ({"grid": [1, 2, 2**70]}, "image_data", "int"),
        ({"grid": [1, 2, 2]}, "image_data", "states"),
        ({"times": "0"}, "image_data", "array"),
        ({"format": "pickle"}, "image_data", "pickle"),
        ({"dtype": "float64"}, "image_data", "float64"),
        ({"shape": [6]}, "image_data", "length"),
        ({"pixels": "x"}, "image_data", "'pixels' is unknown"),
        ({"states": None}, "image_data.states", "address"),
        ({"states": 5}, "image_data.states", "address"),
        ({"states": "%%%"}, "image_data", "base64"),
    ],
)
def test_states_that_are_none(more: dict[str, Any], param: str, words: str) -> None:
    done, _ = ask(text="<|image|>", image_data={**states(), **more})
    error = done.json()["error"]
    assert done.status == 400, done.body
    assert error["param"] == param
    assert words in error["message"]
