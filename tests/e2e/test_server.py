"""A real server with a tiny model: bad input, clients that leave, caching, and what is left afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.servers import Served, serving
from pegboard.core.config.compose import compose

pytestmark = pytest.mark.slow

CONTEXT = 512
TOKENS = 4096


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2)
    config = {
        "model": {"path": str(model), "dtype": "float32", "context_length": CONTEXT, "served_name": "tiny"},
        "memory": {"max_total_tokens": TOKENS},
        "attention": {"use": "torch"},
        "scheduler": {"max_running_requests": 16, "chunked_prefill_size": 64},
    }
    with serving(config, env={**os.environ, "OMP_NUM_THREADS": "1"}) as one:
        yield one


def post(server: Served, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{server.address}{path}", content=content, timeout=120)


def generate(server: Served, prompt: str | list[int], **sampling: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
    answer = post(server, "/generate", {**body, "sampling_params": {"temperature": 0, "ignore_eos": True, **sampling}})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def counters(server: Served) -> dict[str, Any]:
    return dict(httpx.get(f"{server.address}/server_info").json()["scheduler"])


def settled(server: Served) -> dict[str, Any]:
    """The scheduler's counters once nothing runs any more."""
    while True:
        now = counters(server)
        if now["running_requests"] == now["waiting_requests"] == 0:
            return now


def assert_books_balance(server: Served) -> None:
    now = settled(server)
    assert now["free_tokens"] + now["cached_tokens_now"] == now["total_tokens"]
    assert (now["locked_tokens"], now["held_tokens"], now["book_errors"], now["failed_batches"]) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/generate", b'{"text": "a"', 400, "not valid JSON"),
        ("/generate", {"text": ["a", 5]}, 400, "text"),
        ("/generate", {"text": ""}, 400, "empty"),
        ("/generate", {"input_ids": []}, 400, "empty"),
        ("/generate", {"input_ids": [5] * CONTEXT}, 400, f"{CONTEXT} tokens"),
        ("/generate", {"input_ids": [5, 320]}, 400, "320"),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": -1}}, 400, "max_new_tokens"),
        ("/generate", {"text": "a", "sampling_params": {"top_p": "x"}}, 400, "top_p"),
        ("/v1/chat/completions", b"[]", 400, "object"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"model": "gpt-5", "messages": [{"role": "user", "content": "a"}]}, 404, "tiny"),
        ("/v1/completions", {"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
        ("/v1/completions", {"prompt": ""}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "seed": "x"}, 400, "seed"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_is_refused(
    server: Served, path: str, body: bytes | dict[str, Any], status: int, words: str, stream: bool
) -> None:
    answer = post(server, path, {**body, "stream": stream} if isinstance(body, dict) else body)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


def test_one_token_under_the_limit_is_served(server: Served) -> None:
    answer = generate(server, [5] * (CONTEXT - 1), max_new_tokens=100)
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert answer["meta_info"]["completion_tokens"] == 1
    assert_books_balance(server)


def test_repeated_prompts_are_cached_and_answer_alike(server: Served) -> None:
    prompt = list(range(10, 110))
    first, second = (generate(server, prompt, max_new_tokens=8) for _ in range(2))
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens"] == 99
    shared = generate(server, [*prompt[:60], 7, 8, 9], max_new_tokens=8)
    assert shared["meta_info"]["cached_tokens"] == 60
    assert first["output_ids"] == second["output_ids"]
    salted = post(server, "/generate", {"input_ids": prompt, "cache_salt": "mine"}).json()
    assert salted["meta_info"]["cached_tokens"] == 0


def test_flush_forgets(server: Served) -> None:
    prompt = list(range(20, 120))
    generate(server, prompt, max_new_tokens=2)
    settled(server)
    assert post(server, "/flush_cache", b"").status_code == 200
    assert generate(server, prompt, max_new_tokens=2)["meta_info"]["cached_tokens"] == 0


def test_stop_strings_leave_no_trace(server: Served) -> None:
    free = generate(server, "the quick brown", max_new_tokens=40)["text"]
    found = re.search("(?s)(?<=.{5})[ -~]{2,4}", free)
    assert found is not None, "no plain text to stop at"
    stop = found.group()
    body = {"text": "the quick brown", "stream": True}
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 40, "stop": [stop]}
    events = post(server, "/generate", {**body, "sampling_params": sampling}).text.split("\n\n")
    texts = [json.loads(one.removeprefix("data: ")) for one in events if one.startswith("data: {")]
    assert texts[-1]["text"] == free[: free.index(stop)]
    assert texts[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert all(texts[-1]["text"].startswith(one["text"]) for one in texts)


def test_the_openai_library_is_content(server: Served) -> None:
    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
    with client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        messages: Any = [{"role": "user", "content": "hello"}]
        options: Any = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 12}
        whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        assert whole.choices[0].logprobs is not None
        chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
        streamed = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
        assert streamed == whole.choices[0].message.content
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        text = client.completions.create(model="tiny", prompt="the quick", max_tokens=4, temperature=0, n=2)
        assert len(text.choices) == 2
        with pytest.raises(openai.NotFoundError, match="gpt-5"):
            client.chat.completions.create(model="gpt-5", messages=messages)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(**{**options, "temperature": 1000})


def test_leavers_harm_nobody(server: Served) -> None:
    """60 mixed requests at once, a third of which leave: the others answer as they do alone, and nothing stays."""
    prompts = [[(7 * i + j) % 300 + 3 for j in range(5 + 11 * (i % 9))] for i in range(60)]
    alone = [generate(server, prompt, max_new_tokens=12)["output_ids"] for prompt in prompts]

    async def stay(client: httpx.AsyncClient, prompt: list[int]) -> list[int]:
        sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 12}
        answer = await client.post("/generate", json={"input_ids": prompt, "sampling_params": sampling})
        return list(answer.json()["output_ids"])

    async def leave(client: httpx.AsyncClient, prompt: list[int], after: int) -> None:
        sampling = {"ignore_eos": True, "max_new_tokens": 400}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        async with client.stream("POST", "/generate", json=body) as answer:
            async for _ in answer.aiter_lines():
                after -= 1
                if after <= 0:
                    return

    async def scene() -> list[Any]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=server.address, timeout=120, limits=limits) as client:
            return await asyncio.gather(
                *(
                    leave(client, prompt, i % 7) if i % 3 == 0 else stay(client, prompt)
                    for i, prompt in enumerate(prompts)
                )
            )

    together = asyncio.run(scene())
    assert [one for i, one in enumerate(together) if i % 3] == [one for i, one in enumerate(alone) if i % 3]
    assert counters(server)["aborted"] > 0
    assert_books_balance(server)


def test_listens_on_loopback_only(server: Served) -> None:
    process = psutil.Process(server.process.pid)
    family = [process, *process.children(recursive=True)]
    found = {c.laddr.ip for one in family for c in one.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert found == {"127.0.0.1"}
    assert compose(data={"model": {"path": "x/y"}}, env={}).engine.server.host == "127.0.0.1"


def test_api_process_stays_small(server: Served) -> None:
    """No torch, under 200 MB, and flat: 150 requests add less than a megabyte to what 50 had settled at."""
    process = psutil.Process(server.process.pid)
    sizes = []
    with httpx.Client(base_url=server.address, timeout=60) as client:
        for number in range(200):
            sampling = {"max_new_tokens": 4}
            client.post("/generate", json={"text": f"number {number}", "sampling_params": sampling})
            if number in (50, 199):
                sizes.append(process.memory_info().rss)
    assert sizes[1] < 200 * 2**20
    assert sizes[1] - sizes[0] < 2**20
    assert not [one.path for one in process.memory_maps() if "torch" in one.path]


def test_quickstart_is_a_config(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
    engine = compose([example], env={}).engine
    assert (engine.server.host, engine.server.port) == ("127.0.0.1", 30000)
    assert engine.model.path == "demo:smollm2-135m-instruct"
    assert engine.model.dtype == "auto", "the fast path, where there is one"
