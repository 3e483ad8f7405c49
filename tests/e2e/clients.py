"""What the tests with real API clients share: a server of a tiny model whose chat template knows tools and thinking."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from pegboard.conformance.checkpoints import VOCAB_SIZE, tiny_checkpoint
from pegboard.conformance.servers import Served, serving
from pegboard.toolkit.text.tokenizer import Tokenizer

MODEL = "tiny"
KEY, ADMIN_KEY = "sk-user-key", "sk-admin-key"
CONTEXT = 4096
WINDOW = 64
STEPS = 150

# In the manner of Qwen3's.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools

You may call one or more functions. You are provided with function signatures within <tools></tools> XML tags:
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""


def tiny_model(directory: Path) -> Path:
    """A random model that sees its last 64 tokens, with the template."""
    model = tiny_checkpoint(directory, "mistral", num_hidden_layers=2, sliding_window=WINDOW)
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    return model


def teach(model: Path, lessons: Mapping[str, str], *, before: str = "", steps: int = STEPS) -> None:
    """Train the model, for a few seconds, to answer with the text of a lesson whenever the prompt ends in its key,
    whatever comes before: random tokens, and pieces of `before` half of the time, if there is any.
    """
    import torch
    import transformers

    tokenizer = Tokenizer.from_directory(model)
    pairs = [(tokenizer.encode(end), tokenizer.encode(text)) for end, text in lessons.items()]
    length = WINDOW + max(len(end) + len(text) for end, text in pairs)
    known = torch.tensor(tokenizer.encode(before), dtype=torch.int64)
    pairs *= 2 if before else 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        optimizer = torch.optim.AdamW(network.parameters(), lr=4e-3)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 4e-3 * min(1.0, (step + 1) / 20) * (1 - step / steps)
            ids = torch.randint(VOCAB_SIZE, (len(pairs), length))
            labels = torch.full_like(ids, -100)
            for row, (end, text) in enumerate(pairs):
                if row < len(pairs) // 2 and before:
                    start = int(torch.randint(len(known) - length, ()))
                    ids[row] = known[start : start + length]
                ids[row, -len(end) - len(text) :] = torch.tensor(end + text)
                labels[row, -len(text) :] = torch.tensor(text)
            loss = network(input_ids=ids, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert loss.item() < 0.05, "it has not learned its lessons"
    network.save_pretrained(model)


@contextlib.contextmanager
def tiny_server(model: Path, **sections: Any) -> Iterator[Served]:
    """A server of a tiny model; two kinds of keys are set. `sections` are further ones of its config."""
    config = {
        "model": {"path": str(model), "dtype": "float32", "context_length": CONTEXT, "served_name": MODEL},
        "memory": {"max_total_tokens": 8 * CONTEXT},
        "attention": {"use": "torch"},
        "scheduler": {"max_running_requests": 32},
        "server": {"api_key": KEY, "admin_key": ADMIN_KEY, "max_body_bytes": 200_000},
        **sections,
    }
    with serving(config, env={**os.environ, "OMP_NUM_THREADS": "1"}) as server:
        yield server


@dataclass
class Both:
    """A client, sync or async, used the same way in tests."""

    client: Any
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)

    def wait(self, value: Any) -> Any:
        """A result, whether it has to be awaited or not."""
        return self.runner.run(_awaited(value)) if inspect.isawaitable(value) else value

    def items(self, stream: Any) -> list[Any]:
        """All that a stream brings, which may have to be awaited first."""
        stream = self.wait(stream)
        return self.wait(_items(stream)) if hasattr(stream, "__aiter__") else list(stream)

    def next(self, iterator: Any) -> Any:
        """One item of an iterator."""
        return self.wait(anext(iterator)) if hasattr(iterator, "__anext__") else next(iterator)

    @contextlib.contextmanager
    def inside(self, manager: Any) -> Iterator[Any]:
        """A context manager of either kind."""
        if not hasattr(manager, "__aenter__"):
            with manager as value:
                yield value
            return
        value = self.wait(manager.__aenter__())
        try:
            yield value
        finally:
            self.wait(manager.__aexit__(None, None, None))

    def close(self) -> None:
        """End the client, and the loop that it ran on."""
        self.wait(self.client.close())
        self.runner.close()


async def _awaited(value: Any) -> Any:
    return await value


async def _items(stream: Any) -> list[Any]:
    return [one async for one in stream]


def counters(server: Served) -> dict[str, Any]:
    """The scheduler's."""
    answer = httpx.get(f"{server.address}/server_info", headers={"authorization": f"Bearer {ADMIN_KEY}"}, timeout=60)
    return dict(answer.raise_for_status().json()["scheduler"])


def idle(server: Served) -> dict[str, Any]:
    """The scheduler's counters once nothing waits or runs any more."""
    while True:
        now = counters(server)
        if now["running_requests"] == now["waiting_requests"] == 0:
            return now


def assert_balanced(server: Served) -> None:
    """All memory is free or cached."""
    now = idle(server)
    assert now["free_tokens"] + now["cached_tokens_now"] == now["total_tokens"]
    assert (now["locked_tokens"], now["held_tokens"], now["book_errors"], now["failed_batches"]) == (0, 0, 0, 0)
