"""The small model of examples/shapes through a real server: bfloat16, and chunks that end inside pictures."""

from __future__ import annotations

import base64
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from examples.shapes.chats import Message
from examples.shapes.evaluate import fresh, shares
from examples.shapes.files import MODEL
from pegboard.conformance.servers import serving

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    config = {
        "model": {"path": str(MODEL), "dtype": "bfloat16", "served_name": "shapes"},
        "scheduler": {"chunked_prefill_size": 7},
        "memory": {"max_total_tokens": 4096},
    }
    with serving(config) as served, httpx.Client(base_url=served.address, timeout=60) as made:
        yield made


def ask(client: httpx.Client, messages: list[Message], pictures: list[bytes]) -> str:
    """The answer of the OpenAI API, with these pictures in the places that the messages have for them."""
    files = iter(pictures)
    body = {"model": "shapes", "messages": [with_pictures(one, files) for one in messages]}
    done = client.post("/v1/chat/completions", json=body | {"max_tokens": 12, "temperature": 0})
    assert done.status_code == 200, done.text
    return str(done.json()["choices"][0]["message"]["content"])


def with_pictures(message: Message, files: Iterator[bytes]) -> Message:
    content = message["content"]
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        if part["type"] == "image":
            url = "data:image/png;base64," + base64.b64encode(next(files)).decode()
            part = {"type": "image_url", "image_url": {"url": url}}
        parts.append(part)
    return {**message, "content": parts}


def of_all_kinds(client: httpx.Client, pictures: int, shuffled: bool = False) -> dict[str, float]:
    """Shares of exact answers. Each kind of question is asked by a thread of its own, so that requests share steps."""

    def one(kind: str) -> dict[str, float]:
        return shares(
            lambda messages, files: ask(client, messages, files), fresh(pictures), shuffled=shuffled, kinds=[kind]
        )

    with ThreadPoolExecutor(3) as pool:
        return {kind: share for found in pool.map(one, ("colour", "count", "shape")) for kind, share in found.items()}


def test_three_hundred_pictures(client: httpx.Client) -> None:
    found = of_all_kinds(client, 300)
    assert found["colour"] >= 0.98
    assert found["count"] >= 0.95
    assert found["shape"] >= 0.85


def test_other_pictures_bring_it_down_to_chance(client: httpx.Client) -> None:
    found = of_all_kinds(client, 100, shuffled=True)
    assert found["colour"] < 0.3
    assert found["count"] < 0.4
    assert found["shape"] < 0.35


def test_the_readme_says_what_it_answers(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    page = (root / "examples" / "shapes" / "README.md").read_text("utf-8")
    (block,) = [one for one in page.split("```") if one.startswith("console")]
    *commands, said = block.strip().splitlines()[1:]
    for command in commands:
        words = [word.replace("/tmp/pictures", str(tmp_path)) for word in shlex.split(command.removeprefix("$ "))]
        words[0] = str(Path(sys.executable).with_name(Path(words[0]).name))
        done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == said
