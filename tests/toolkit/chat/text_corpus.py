"""Conversations without media, in the words of each API: what they become must not change.

``python -m tests.toolkit.chat.text_corpus`` writes the digests of what the code at hand makes of them. Those in
tests/data/text_prompts.json are of the commit before conversations could have media.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pegboard.conformance.asgi import call
from pegboard.conformance.fake_client import TEMPLATE, FakeEngineClient, FakeTokenizer, prompt_text
from pegboard.core.interfaces.api_router import ApiContext
from pegboard.plugins.api_anthropic.options import AnthropicOptions
from pegboard.plugins.api_anthropic.router import AnthropicRouter
from pegboard.plugins.api_native.options import NativeOptions
from pegboard.plugins.api_native.router import NativeRouter
from pegboard.plugins.api_openai.options import OpenAIOptions
from pegboard.plugins.api_openai.router import OpenAIRouter
from pegboard.toolkit.http.app import build_app
from tests.plugins.api_anthropic.parsers import fake_parsers
from tests.toolkit.chat.templates import ONLY_PARTS, PARTS, TEXTS, TOOLS_AND_PARTS

DIGESTS = Path(__file__).parents[2] / "data" / "text_prompts.json"
TEMPLATES = {"plain": TEMPLATE, "parts": PARTS, "tools": TOOLS_AND_PARTS, "texts": TEXTS, "only parts": ONLY_PARTS}
SPELLINGS = ("<|media|>", "<|image|>", "<|video|>", "<|vision_start|>", "<|image_pad|>", "<image>")
_TEXTS = (
    *(
        "Hi",
        "What is this?",
        " two\nlines ",
        "漢字 \U0001f600 é",
        "",
        "<think>\nhm\n</think>\n\nSo",
        "\\ \"quoted\" 'x'",
    ),
    *("image", "id", "{{ 7 * 7 }}", "<|im_end|>", "]]", "1234567890", "a < b and b > c", "<|", "|>"),
)
_PNG = "data:image/png;base64,iVBORw0KGgo="
_TOOL = {"name": "look", "description": "Looks at {}", "parameters": {"type": "object", "properties": {"id": {}}}}


@dataclass(frozen=True)
class Case:
    """One request. `spells`: some text of it is the spelling of a token; `media`: it has pictures or video."""

    template: str
    path: str
    body: dict[str, Any]
    spells: bool = False
    media: bool = False


def cases() -> Iterator[Case]:
    """Yield the corpus, always the same."""
    yield from _pictures()
    for number in range(240):
        rng = random.Random(number)
        template, spells = list(TEMPLATES)[number % len(TEMPLATES)], number % 3 == 0
        make = (_chat, _response, _message, _tokenize)[rng.choice((0, 0, 1, 2, 2, 3))]
        path, body = make(_Words(rng, spells))
        if template != "parts":
            body.pop("chat_template_kwargs", None)
        yield Case(template, path, body, spells)


def _pictures() -> Iterator[Case]:
    """Yield what models without media refuse."""
    part = {"type": "image_url", "image_url": {"url": _PNG}}
    item = {"type": "input_image", "image_url": _PNG, "detail": "auto"}
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block]}
    user = {"role": "user"}
    chat, text = "/v1/chat/completions", {"type": "text", "text": "Look"}
    message = {"model": "fake-model", "max_tokens": 9}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (chat, {"messages": [{**user, "content": [text, part]}]}),
        (chat, {"messages": [{**user, "content": [{"type": "video_url", "video_url": {"url": _PNG}}]}]}),
        (chat, {"messages": [{**user, "content": [{"type": "input_audio"}]}]}),
        (chat, {"messages": [{**user, "content": "Hi"}], "mm_processor_kwargs": {"max_pixels": 9}}),
        (chat, {"messages": [{**user, "content": "Hi"}], "mm_processor_kwargs": "odd"}),
        (chat, {"messages": [{**user, "content": "Hi"}], "mm_processor_kwargs": {}}),
        ("/v1/tokenize", {"messages": [{**user, "content": [part]}]}),
        ("/v1/responses", {"input": [{**user, "content": [{"type": "input_text", "text": "Look"}, item]}]}),
        ("/v1/responses", {"input": [{**user, "content": [{"type": "input_file", "file_id": "f"}]}]}),
        ("/v1/responses", {"input": "Hi", "mm_processor_kwargs": {"max_pixels": 9}}),
        ("/v1/messages", {**message, "messages": [{**user, "content": [block]}]}),
        ("/v1/messages", {**message, "system": [block], "messages": [{**user, "content": "Hi"}]}),
        ("/v1/messages", {**message, "messages": [called, {**user, "content": [result]}]}),
        ("/v1/messages/count_tokens", {"model": "fake-model", "messages": [{**user, "content": [block]}]}),
    ]  # fmt: skip
    for name in ("image_data", "video_data", "audio_data"):
        bodies += [
            ("/generate", {"text": "a", name: value}) for value in (_PNG, [_PNG], [[_PNG]], [None], "", {"a": 1})
        ]
    bodies.append(("/generate", {"text": "a", "mm_processor_kwargs": {"max_pixels": 9}}))
    yield from (Case("plain", path, body, media=True) for path, body in bodies)


class _Words:
    """Texts, drawn."""

    def __init__(self, rng: random.Random, spells: bool) -> None:
        self.rng = rng
        self._words = (*_TEXTS, *SPELLINGS, *SPELLINGS) if spells else _TEXTS

    def text(self) -> str:
        return self.rng.choice(("", " ", "\n", "-")).join(self.rng.choices(self._words, k=self.rng.randint(1, 4)))

    def maybe(self, *fields: tuple[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in fields if self.rng.random() < 0.4}

    def parts(self, kinds: tuple[str, ...]) -> Any:
        if self.rng.random() < 0.5:
            return self.text()
        return [{"type": self.rng.choice(kinds), "text": self.text()} for _ in range(self.rng.randint(1, 3))]

    def arguments(self) -> dict[str, Any]:
        return {"q": self.text(), self.text(): [self.text(), 1, None, {"deep": self.text()}]}

    def tool(self, **more: Any) -> dict[str, Any]:
        return {**_TOOL, "description": self.text(), **more}


def _chat(words: _Words) -> tuple[str, dict[str, Any]]:
    rng = words.rng
    body: dict[str, Any] = {
        "messages": _chat_messages(words),
        **words.maybe(
            ("chat_template_kwargs", {"add_vision_id": True}),
            ("thinking", {"type": "disabled"}),
            ("add_generation_prompt", False),
        ),
    }
    if rng.random() < 0.4:
        body["tools"] = [{"type": "function", "function": words.tool()}]
    if body["messages"][-1]["role"] == "assistant" and rng.random() < 0.6 and body["messages"][-1].get("content"):
        body |= {"continue_final_message": True}
    return "/v1/chat/completions", body


def _chat_messages(words: _Words) -> list[dict[str, Any]]:
    rng, messages = words.rng, []
    if rng.random() < 0.4:
        role = rng.choice(("system", "developer"))
        messages.append({"role": role, "content": words.parts(("text",))})
    for turn in range(rng.randint(1, 3)):
        messages.append(
            {"role": "user", "content": words.parts(("text",)), **words.maybe(("name", words.text() or "n"))}
        )
        if rng.random() < 0.3:
            function = {"name": "look", "arguments": rng.choice((json.dumps(words.arguments()), words.text(), ""))}
            asked = {"id": f"c{turn}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": rng.choice((None, words.text())), "tool_calls": [asked]})
            messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": words.parts(("text",))})
        if rng.random() < 0.6:
            said = words.parts(("text", "refusal"))
            if isinstance(said, list):
                said = [{"type": one["type"], one["type"]: one["text"]} for one in said]
            thought = words.maybe(("reasoning_content", words.text()))
            messages.append({"role": "assistant", "content": said, **thought})
    return messages


def _tokenize(words: _Words) -> tuple[str, dict[str, Any]]:
    return "/v1/tokenize", {"messages": _chat_messages(words)}


def _response(words: _Words) -> tuple[str, dict[str, Any]]:
    rng = words.rng
    items: list[dict[str, Any]] = []
    for turn in range(rng.randint(1, 3)):
        items.append({"role": "user", "content": words.parts(("input_text",))})
        if rng.random() < 0.4:
            items.append(
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": words.text()}]}
            )
        if rng.random() < 0.4:
            asked = {"call_id": f"c{turn}", "name": "look", "arguments": json.dumps(words.arguments())}
            items.append({"type": "function_call", **asked})
            told = words.parts(("input_text",))
            items.append({"type": "function_call_output", "call_id": f"c{turn}", "output": told})
        items.append({"role": "assistant", "content": words.parts(("output_text",))})
    body = {"input": rng.choice((items, items, words.text() or "x")), "store": False}
    tools = [{"type": "function", **words.tool()}, {"type": "custom", "name": "free", "description": words.text()}]
    return "/v1/responses", {**body, **words.maybe(("instructions", words.text()), ("tools", tools))}


def _message(words: _Words) -> tuple[str, dict[str, Any]]:
    rng = words.rng
    messages: list[dict[str, Any]] = []
    for turn in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": words.parts(("text",))})
        said: list[dict[str, Any]] = [{"type": "text", "text": words.text()}]
        if rng.random() < 0.3:
            said.insert(0, {"type": "thinking", "thinking": words.text(), "signature": "x"})
        if rng.random() < 0.4:
            said.append({"type": "tool_use", "id": f"c{turn}", "name": "look", "input": words.arguments()})
            result = {"type": "tool_result", "tool_use_id": f"c{turn}", "content": words.parts(("text",))}
            after = [result, {"type": "text", "text": words.text()}][: rng.randint(1, 2)]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": after}]
        elif rng.random() < 0.7:
            messages.append({"role": "assistant", "content": said})
    body = {"model": "fake-model", "messages": messages, **words.maybe(("system", words.parts(("text",))))}
    if rng.random() < 0.4:
        body["tools"] = [{"name": "look", "description": words.text(), "input_schema": _TOOL["parameters"]}]
    return rng.choice((("/v1/messages", {**body, "max_tokens": 9}), ("/v1/messages/count_tokens", body)))


def make_app(client: FakeEngineClient) -> Any:
    """Return all APIs of one engine, as a server mounts them."""
    parsers: Any = fake_parsers()
    ctx = ApiContext(client=client, max_body_bytes=10**7, **parsers)
    routers: list[tuple[str, Any]] = [
        ("openai", OpenAIRouter(OpenAIOptions(stored_responses=10, stored_bytes=10**6), ctx)),
        ("anthropic", AnthropicRouter(AnthropicOptions(), ctx)),
        ("native", NativeRouter(NativeOptions(health_timeout=1.0), ctx)),
    ]
    return build_app(routers, max_body_bytes=10**7)


async def outcomes(some: list[Case], **client: Any) -> list[object]:
    """Return what an engine is asked for each request, or how the request is refused. `client` is the engine's."""
    engines = {
        name: FakeEngineClient(tokenizer=FakeTokenizer(template=template), **client)
        for name, template in TEMPLATES.items()
    }
    apps = {name: make_app(engine) for name, engine in engines.items()}
    found: list[object] = []
    for case in some:
        engine = engines[case.template]
        engine.requests.clear()
        done = await call(apps[case.template], "POST", case.path, case.body)
        if done.status != 200:
            found.append([done.status, done.json()["error"]])
            continue
        told = {name: done.json()[name] for name in ("tokens", "input_tokens") if name in done.json()}
        found.append([told, [[prompt_text(one.prompt), one.add_special_tokens] for one in engine.requests]])
    return found


def digest(found: object) -> str:
    return hashlib.blake2b(json.dumps(found, sort_keys=True).encode(), digest_size=6).hexdigest()


if __name__ == "__main__":
    made = asyncio.run(outcomes(list(cases())))
    DIGESTS.write_text(json.dumps([digest(one) for one in made], indent=0) + "\n")
