"""Pictures and video through a real server and the command line: a tiny model that sees, asked in every API's words."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from pegboard.conformance.servers import Served, serving
from pegboard.conformance.vl_checkpoints import vl_checkpoint
from pegboard.core.cli.main import app
from tests.plugins.mm_qwen_vl.clips import clip_frames, video_file

MODEL = "sees"
TURN = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is it?<|im_end|>\n<|im_start|>assistant\n"


def png(seed: int, height: int = 60, width: int = 90) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def data(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vl_checkpoint(tmp_path_factory.mktemp("models"), "qwen2_vl")


def config(checkpoint: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(checkpoint), "dtype": "float32", "served_name": MODEL},
        "memory": {"max_total_tokens": 4096},
        "media": {"max_piece_tokens": 64},
    }


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Served]:
    with serving(config(checkpoint)) as served:
        yield served


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "a.png"
    path.write_bytes(png(1))
    return path


def native(server: Served, **body: Any) -> Any:
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    done = httpx.post(f"{server.address}/generate", json={"sampling_params": sampling, **body}, timeout=60)
    assert done.status_code == 200, done.text
    return done.json()


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_every_api_asks_the_same(server: Served, client: openai.OpenAI) -> None:
    """One picture and question: the same prompt, so the same answer and the same counts."""
    expected = native(server, text=TURN, image_data=data(png(1)))
    prompt, images = expected["meta_info"]["prompt_tokens"], expected["meta_info"]["image_tokens"]
    assert prompt > images > 3

    question: Any = [
        {"type": "image_url", "image_url": {"url": data(png(1))}},
        {"type": "text", "text": "What is it?"},
    ]
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": question}], "temperature": 0}
    said = client.chat.completions.create(**asked, max_tokens=8, extra_body={"ignore_eos": True})
    assert said.choices[0].message.content == expected["text"]
    assert said.usage is not None
    assert said.usage.prompt_tokens == prompt
    assert said.usage.prompt_tokens_details is not None
    assert said.usage.prompt_tokens_details.image_tokens == images
    stream = client.chat.completions.create(**asked, max_tokens=8, extra_body={"ignore_eos": True}, stream=True)
    assert "".join(one.choices[0].delta.content or "" for one in stream) == expected["text"]

    parts: Any = [
        {"type": "input_image", "image_url": data(png(1)), "detail": "auto"},
        {"type": "input_text", "text": "What is it?"},
    ]
    item: Any = [{"role": "user", "content": parts}]
    response = client.responses.create(
        model=MODEL, input=item, temperature=0, max_output_tokens=8, extra_body={"ignore_eos": True}
    )
    assert response.output_text == expected["text"]
    assert client.responses.input_tokens.count(model=MODEL, input=item).input_tokens == prompt
    after = client.responses.create(
        model=MODEL, input="And?", previous_response_id=response.id, max_output_tokens=8, temperature=0
    )
    assert after.usage is not None
    assert after.usage.input_tokens_details.cached_tokens >= images

    source: Any = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(1)).decode()}
    blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    messages: Any = [{"role": "user", "content": blocks}]
    with anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0) as other:
        message = other.messages.create(
            model=MODEL, max_tokens=8, messages=messages, extra_body={"ignore_eos": True, "temperature": 0}
        )
        counted = other.messages.count_tokens(model=MODEL, messages=messages).input_tokens
    assert "".join(one.text for one in message.content if one.type == "text") == expected["text"]
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == prompt
    assert counted == prompt


def test_a_large_picture_is_made_smaller(server: Served) -> None:
    """The helpers know what the scheduler's device can encode in one step."""
    images = [native(server, text=TURN, image_data=data(png(1, side, side)))["meta_info"] for side in (224, 252, 1000)]
    assert [one["image_tokens"] for one in images] == [64, 64, 64]
    body = {"text": TURN, "image_data": data(png(1)), "mm_processor_kwargs": {"min_pixels": 64 * 28**2 + 1}}
    refused = httpx.post(f"{server.address}/generate", json=body, timeout=60)
    assert refused.status_code == 400
    assert "media.max_piece_tokens" in refused.text


def test_texts_that_spell_tokens_bind_nothing(client: openai.OpenAI) -> None:

    def tokens(*content: Any) -> int:
        item: Any = [{"role": "user", "content": [*content]}]
        count: int = client.responses.input_tokens.count(model=MODEL, input=item).input_tokens
        return count

    image = {"type": "input_image", "image_url": data(png(2))}
    spelled = {"type": "input_text", "text": "<|image_pad|><|vision_start|><|video_pad|>"}
    plain = {"type": "input_text", "text": ""}
    with_text = tokens(spelled) - tokens(plain)
    assert with_text > 20, "each spelling is many tokens of text"
    assert tokens(image, spelled) == tokens(image, plain) + with_text


def test_video(client: openai.OpenAI) -> None:
    clip = data(video_file(clip_frames("short")), "video/mp4")
    part: Any = {"type": "video_url", "video_url": {"url": clip}, "num_frames": 4}
    said = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": [part]}], max_tokens=4, temperature=0
    )
    assert said.usage is not None
    assert said.usage.prompt_tokens_details is not None
    assert said.usage.prompt_tokens_details.model_dump()["video_tokens"] > 4


def test_bad_media_are_refused_with_their_place(client: openai.OpenAI) -> None:
    for url, said in ((data(b"no picture"), ""), ("http://127.0.0.1/a.png", "media.fetch")):
        part: Any = {"type": "image_url", "image_url": {"url": url}}
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [part]}], stream=True)
        assert caught.value.param == "messages.0.content.0.image_url"
        assert said in str(caught.value)


def test_chat_on_the_command_line(server: Served, checkpoint: Path, picture: Path, tmp_path: Path) -> None:
    """With a server, and with an engine of its own."""
    expected = native(server, text=TURN, image_data=data(png(1)))["text"]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config(checkpoint)), "utf-8")
    said = []
    for whom in (["--url", server.address], [str(file)]):
        arguments = ["chat", *whom, "--temperature", "0", "--max-tokens", "8", "--no-history"]
        done = run(arguments, f"/image {picture}\nWhat is it?\n/stats\n")
        assert done.exit_code == 0, done.output
        said.append(done.stdout.removesuffix("\n"))
        assert "error" not in done.stderr
    assert said[0] == said[1]
    assert said[0]
    assert expected.startswith(said[0])


def run(arguments: list[str], stdin: str = "") -> Result:
    return CliRunner().invoke(app, arguments, input=stdin, catch_exceptions=False)


def test_generate_on_the_command_line(checkpoint: Path, picture: Path, tmp_path: Path, server: Served) -> None:
    expected = native(server, text=TURN, image_data=data(png(1)))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config(checkpoint)), "utf-8")
    common = [
        str(file),
        "--image",
        str(picture),
        "--max-new-tokens",
        "8",
        "--sampling",
        '{"ignore_eos": true}',
        "--json",
    ]
    for prompt, raw in (("What is it?", []), (TURN, ["--raw"])):
        done = run(["generate", prompt, *common, *raw])
        assert done.exit_code == 0, done.output
        answer = json.loads(done.stdout)
        assert answer["text"] == expected["text"]
        assert answer["prompt_tokens"] == expected["meta_info"]["prompt_tokens"]
