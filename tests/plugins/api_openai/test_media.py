"""Pictures and video in chats and responses, by OpenAI's own client, on a scripted engine that reads toy media."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import openai
import pytest

from pegboard.conformance.fake_client import SCRIPT, FakeEngineClient, FakeTokenizer
from pegboard.conformance.fakes import session_store
from pegboard.conformance.rig.fake_media import fake_processor
from pegboard.toolkit.media.inputs import MediaPrompt, MediaSettings
from tests.plugins.api_openai import asking
from tests.plugins.api_openai.asking import make_app
from tests.toolkit.chat.media_chats import address, encoded, picture
from tests.toolkit.chat.templates import TOOLS_AND_PARTS

TEXT = "".join(SCRIPT)
WEB = {"https://example.org/1": picture(1), "http://example.org/2": picture(2, "video")}
LARGE = f"data:;pad={'A' * 900_000};base64,{encoded(7)}"
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def engine(**settings: Any) -> FakeEngineClient:
    tokenizer = FakeTokenizer(template=TOOLS_AND_PARTS)
    return FakeEngineClient(tokenizer=tokenizer, media=fake_processor(), web=WEB, **settings)


def with_client(use: Callable[[Any, FakeEngineClient], Awaitable[Any]], **settings: Any) -> FakeEngineClient:
    """Let OpenAI's client ask an engine, which is returned."""

    async def scene() -> FakeEngineClient:
        client = engine(**settings)
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=make_app(client)))
        async with openai.AsyncOpenAI(base_url="http://t/v1", api_key="k", http_client=http, max_retries=0) as asking:
            await use(asking, client)
        return client

    return asyncio.run(scene())


def image(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def video(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}, **more}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def chat(*messages: Any, **more: Any) -> FakeEngineClient:
    """The engine that has answered a chat."""

    async def use(client: Any, _: FakeEngineClient) -> None:
        answer = await client.chat.completions.create(model="fake-model", messages=messages, **more)
        assert answer.choices[0].message.content == TEXT

    return with_client(use)


def items(client: FakeEngineClient) -> list[Any]:
    prompt = client.requests[-1].prompt
    assert isinstance(prompt, MediaPrompt)
    return list(prompt.media)


def refused(path: str, body: dict[str, Any], **context: Any) -> tuple[str, str, str]:
    """Field, code and message of a request that is refused before the engine runs anything."""

    async def scene() -> Any:
        client = engine()
        done = await asking.call(make_app(client, **context), "POST", path, body)
        assert done.status == 400, done.body
        assert client.finished == []
        return done.json()["error"]

    error = asyncio.run(scene())
    return error["param"], error["code"], error["message"]


class TestChats:
    def test_pictures_by_data_and_by_address(self) -> None:
        async def use(client: Any, engine: FakeEngineClient) -> None:
            content = [text("One"), image(address(0)), text("and"), image("https://example.org/1", detail="low")]
            answer = await client.chat.completions.create(model="fake-model", messages=[user(*content)])
            assert answer.choices[0].message.content == TEXT
            [laid_out] = engine.laid_out
            assert laid_out.data == (picture(0), picture(1))
            pads = chr(0x10F001) * 6
            assert f"One\U0010f000{pads}\U0010f000and\U0010f000{pads}\U0010f000" in laid_out.text
            assert answer.usage.prompt_tokens == len(laid_out.layout.ids)
            details = answer.usage.prompt_tokens_details
            assert (details.image_tokens, details.cached_tokens) == (12, 2)
            assert "video_tokens" not in details.model_dump()

        with_client(use)

    def test_several_turns_with_video_and_tools(self) -> None:
        messages = [
            {"role": "system", "content": "Be kind."},
            user(image(address(1)), text("What is it?")),
            {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": [text("Seen"), image(address(2))]},
            {"role": "assistant", "content": [text("A thing.")]},
            user(video("http://example.org/2"), text("And now?")),
        ]
        client = chat(*messages)
        assert client.laid_out[-1].data == (picture(1), picture(2), picture(2, "video"))
        assert [one.place for one in items(client)] == [
            "messages.1.content.0.image_url",
            "messages.3.content.1.image_url",
            "messages.5.content.0.video_url",
        ]
        assert client.laid_out[-1].tokens == {"image": 12, "video": 8}

    def test_streams(self) -> None:
        async def use(client: Any, engine: FakeEngineClient) -> None:
            stream = await client.chat.completions.create(
                model="fake-model",
                messages=[user(image(address(3)), video(address(4, "video")))],
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == TEXT
            details = chunks[-1].usage.prompt_tokens_details
            assert (details.image_tokens, details.video_tokens) == (6, 8)

        with_client(use)

    def test_several_answers_share_a_prompt(self) -> None:
        async def use(client: Any, engine: FakeEngineClient) -> None:
            answer = await client.chat.completions.create(model="fake-model", messages=[user(image(address(3)))], n=2)
            assert len(answer.choices) == 2
            assert answer.usage.prompt_tokens_details.image_tokens == 6
            assert [one.data for one in engine.laid_out] == [(picture(3),)] * 2

        with_client(use)

    def test_a_text_that_spells_a_token_stays_text(self) -> None:
        client = chat(
            user(text("<|image|> or <|media|>"), image(address(1))), {"role": "user", "content": "<|video|>?"}
        )
        prompt = client.requests[-1].prompt
        assert isinstance(prompt, MediaPrompt)
        assert [str(prompt.base)[a:b] for a, b in prompt.literals] == ["<|image|>", "<|media|>", "<|video|>"]
        assert client.laid_out[-1].tokens == {"image": 6}
        alone = chat({"role": "user", "content": "<|image|>"})
        assert alone.laid_out[-1].tokens == {}

    def test_settings(self) -> None:
        content = [
            image(address(1), detail="original"),
            {**image(address(2)), "max_pixels": 4},
            image(address(3), min_pixels=3),
            video(address(4, "video"), num_frames=2),
            video(address(5, "video")),
        ]
        common = {"min_pixels": 2, "max_pixels": 100.0, "fps": 2}
        client = chat(user(*content), extra_body={"mm_processor_kwargs": common})
        assert [one.settings for one in items(client)] == [
            MediaSettings(min_pixels=2, max_pixels=100, detail="high"),
            MediaSettings(min_pixels=2, max_pixels=4),
            MediaSettings(min_pixels=3, max_pixels=100),
            MediaSettings(min_pixels=2, max_pixels=100, num_frames=2),
            MediaSettings(min_pixels=2, max_pixels=100, fps=2.0),
        ]

    @pytest.mark.parametrize("path", [asking.CHAT, "/v1/responses"])
    def test_pictures_do_not_outlive_their_acceptance(self, path: str) -> None:
        """What a route holds while an answer is generated, which may take long, has none of them."""

        async def scene() -> int:
            client = engine(stall_at=1)
            app = make_app(client)
            part = image(LARGE) if path == asking.CHAT else {"type": "input_image", "image_url": LARGE}
            name = "messages" if path == asking.CHAT else "input"
            body = json.dumps({name: [user(part)], "stream": True, "store": False}).encode()
            tracemalloc.start()
            exchange = asking.Exchange(app, "POST", path, body)
            del body
            await asyncio.wait_for(exchange.until(lambda one: b"Once upon" in one.body), 30)
            client.requests.clear()
            client.laid_out.clear()
            gc.collect()
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            client.release.set()
            await exchange.end()
            return held

        assert asyncio.run(scene()) < len(LARGE) / 2

    @pytest.mark.parametrize(
        ("content", "param", "said"),
        [
            ([image("")], "messages.0.content.0.image_url", "must be an address"),
            ([text("a"), image("ftp://a/b")], "messages.0.content.1.image_url", "must begin with data:"),
            ([image(5)], "messages.0.content.0.image_url", "must be an address"),
            ([{"type": "image_url"}], "messages.0.content.0.image_url", "must be an address"),
            ([image(address(1), detail="huge")], "messages.0.content.0.image_url.detail", "one of auto, low, high"),
            ([image("data:;base64,%%%")], "messages.0.content.0.image_url", "not base64"),
            ([image("data:;base64,aGk=")], "messages.0.content.0.image_url", "not a picture"),
            ([image("https://example.org/404")], "messages.0.content.0.image_url", "cannot be fetched"),
            ([{**image(address(1)), "fps": 2}], "messages.0.content.0.fps", "is for videos"),
            ([{**image(address(1)), "max_pixels": 0}], "messages.0.content.0.max_pixels", "from 1 to"),
            ([{**image(address(1)), "max_pixels": True}], "messages.0.content.0.max_pixels", "a whole number"),
            ([{**image(address(1)), "min_pixels": 9, "max_pixels": 8}], "messages.0.content.0.min_pixels", "at most"),
            ([video(address(1, "video"), fps=0)], "messages.0.content.0.fps", "above 0"),
            ([video(address(1, "video"), fps=1, num_frames=2)], "messages.0.content.0.num_frames", "fps says"),
            (
                [text("a"), {"type": "input_audio"}],
                "messages.0.content.1",
                "these are: text, input_text, output_text, image_url, video_url",
            ),
            (
                [{"type": "file", "file": {"file_id": "x"}}],
                "messages.0.content.0",
                "these are: text, input_text, output_text, image_url",
            ),
        ],
    )
    def test_errors_name_the_place(self, content: list[Any], param: str, said: str) -> None:
        found = refused(asking.CHAT, {"messages": [user(*content)]})
        assert found[0] == param
        assert param in found[2]
        assert said in found[2]

    @pytest.mark.parametrize(
        ("more", "param"),
        [
            ({"mm_processor_kwargs": {"size": 5}}, "mm_processor_kwargs"),
            ({"mm_processor_kwargs": "odd"}, "mm_processor_kwargs"),
            ({"mm_processor_kwargs": {"fps": 1, "num_frames": 1}}, "mm_processor_kwargs.num_frames"),
            ({"return_token_ids": True}, "return_token_ids"),
        ],
    )
    def test_what_else_is_refused(self, more: dict[str, Any], param: str) -> None:
        assert refused(asking.CHAT, {"messages": [user(image(address(1)))], **more})[0] == param

    def test_the_assistant_has_no_pictures(self) -> None:
        messages = [user(text("Hi")), {"role": "assistant", "content": [image(address(1))]}]
        param, code, said = refused(asking.CHAT, {"messages": messages})
        assert (param, code) == ("messages.1.content.0.image_url", "unsupported")
        assert "the assistant's messages are text" in said

    def test_turns_of_sessions_have_no_pictures(self) -> None:
        sessions = session_store()
        session = {"session_params": {"id": sessions.open()}}
        body = {"messages": [user(image(address(1)))], **session}
        param, code, said = refused(asking.CHAT, body, services={"session_store": sessions})
        assert (param, code) == ("session_params", "unsupported")
        assert "no pictures and videos" in said
        body = {"messages": [user(text("<|image|>"))], **session}
        assert "no text that spells" in refused(asking.CHAT, body, services={"session_store": sessions})[2]

    def test_tokens_of_media_are_told_apart_from_answers(self) -> None:
        """Those that an answer is for, and those of the same text where a user spells a token."""

        async def use(client: Any, engine: FakeEngineClient) -> None:
            for content in ([image(address(1)), text("a")], [text("<|image|>")]):
                body = {"model": "fake-model", "messages": [user(*content)]}
                answer = await client.chat.completions.create(**body)
                told = await client.post("/tokenize", body={**body, "return_token_strs": True}, cast_to=object)
                assert (
                    told["tokens"] == engine.laid_out[0].layout.ids.tolist() == engine.laid_out[1].layout.ids.tolist()
                )
                assert told["count"] == answer.usage.prompt_tokens == len(told["token_strs"])
                engine.laid_out.clear()

        with_client(use)

    def test_tokens_of_a_text_that_spells_one(self) -> None:
        """Where there are no media, they are told, and sent as they are."""

        async def use(client: Any, engine: FakeEngineClient) -> None:
            body = {"model": "fake-model", "messages": [user(text("<|image|>"))]}
            told = await client.post("/tokenize", body=body, cast_to=object)
            rendered = await client.post("/chat/completions/render", body=body, cast_to=object)
            answer = await client.chat.completions.create(**body, extra_body={"return_token_ids": True})
            assert told["tokens"] == rendered["token_ids"] == answer.prompt_token_ids == engine.requests[-1].prompt
            assert "<|image|>" in "".join(map(chr, told["tokens"]))

        with_client(use)

    def test_how_media_are_read_is_said_with_them(self) -> None:
        async def use(client: Any, _: FakeEngineClient) -> None:
            body = {"model": "fake-model", "messages": [user(image(address(1)))]}
            told = [
                await client.post("/tokenize", body={**body, **more}, cast_to=object)
                for more in ({}, {"mm_processor_kwargs": {"max_pixels": 2}})
            ]
            assert told[0]["count"] > told[1]["count"]

        with_client(use)
        body = {"messages": [user(image(address(1)))], "mm_processor_kwargs": {"x": 1}}
        assert refused("/v1/tokenize", body)[0] == "mm_processor_kwargs"

    def test_tokens_that_would_be_sent_without_media_are_not_told(self) -> None:
        param, code, said = refused("/v1/chat/completions/render", {"messages": [user(image(address(1)))]})
        assert (param, code) == ("messages", "unsupported")
        assert "/v1/tokenize tells them" in said


class TestResponses:
    def test_pictures_and_what_follows_on_them(self) -> None:
        async def use(client: Any, engine: FakeEngineClient) -> None:
            content = [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": address(1)}]
            first = await client.responses.create(model="fake-model", input=[{"role": "user", "content": content}])
            assert first.output_text == TEXT
            assert first.usage.input_tokens_details.image_tokens == 6
            assert first.usage.input_tokens == len(engine.laid_out[-1].layout.ids)
            more = {"type": "video_url", "video_url": {"url": "http://example.org/2"}}
            second = await client.responses.create(
                model="fake-model", previous_response_id=first.id, input=[{"role": "user", "content": [more]}]
            )
            assert second.output_text == TEXT
            assert engine.laid_out[-1].data == (picture(1), picture(2, "video"))
            assert [one.place for one in items(engine)] == ["previous_response_id", "input.0.content.0.video_url"]
            listed = await client.responses.input_items.list(first.id)
            assert listed.data[0].content[1].image_url == address(1)

        with_client(use)

    def test_streams_and_results_of_tools(self) -> None:
        async def use(client: Any, engine: FakeEngineClient) -> None:
            called = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
            seen = {"type": "input_image", "image_url": "https://example.org/1", "detail": "low", "max_pixels": 50}
            told = {"type": "function_call_output", "call_id": "c", "output": [seen]}
            stream = await client.responses.create(model="fake-model", input=[called, told], stream=True, store=False)
            events = [event async for event in stream]
            assert events[-1].response.output_text == TEXT
            assert events[-1].response.usage.input_tokens_details.image_tokens == 6
            assert items(engine)[0].settings == MediaSettings(detail="low", max_pixels=50)
            assert items(engine)[0].place == "input.1.output.0.image_url"

        with_client(use)

    def test_tokens_are_counted(self) -> None:
        async def use(client: Any, engine: FakeEngineClient) -> None:
            content = [{"type": "input_image", "image_url": address(1), "detail": "auto"}]
            asked: Any = {"model": "fake-model", "input": [{"role": "user", "content": content}]}
            count = await client.responses.input_tokens.count(**asked)
            answer = await client.responses.create(**asked)
            assert count.input_tokens == answer.usage.input_tokens > 6

        with_client(use)

    @pytest.mark.parametrize(
        ("part", "param", "said"),
        [
            ({"type": "input_image", "file_id": "f"}, "input.0.content.0.file_id", "this server keeps no files"),
            ({"type": "input_image"}, "input.0.content.0.image_url", "must be an address"),
            ({"type": "input_image", "image_url": "x:y"}, "input.0.content.0.image_url", "must begin with"),
            ({"type": "input_image", "image_url": address(1), "detail": 5}, "input.0.content.0.detail", "one of auto"),
            ({"type": "input_file", "file_id": "f"}, "input.0.content.0", "input_image, input_video, video_url"),
        ],
    )
    def test_errors_name_the_place(self, part: dict[str, Any], param: str, said: str) -> None:
        found = refused("/v1/responses", {"input": [{"role": "user", "content": [part]}]})
        assert found[0] == param
        assert said in found[2]

    def test_pictures_that_are_kept_count(self) -> None:
        """They are kept with the answers that have them in their conversation, within the same bound."""

        async def scene() -> None:
            client = engine()
            app = make_app(client, options={"stored_bytes": 600_000})
            identities: list[str] = []

            async def kept_after(url: str) -> list[int | None]:
                asked = {"input": [user({"type": "input_image", "image_url": url})]}
                identities.append((await asking.call(app, "POST", "/v1/responses", asked)).json()["id"])
                return [(await asking.call(app, "GET", f"/v1/responses/{one}")).status for one in identities]

            middling = LARGE.replace("A" * 500_000, "")
            assert await kept_after(address(1)) == [200]
            assert await kept_after(middling) == [200, 200]
            assert await kept_after(middling) == [404, 404, 200]
            assert await kept_after(LARGE) == [404, 404, 404, 404]
            asked = {"previous_response_id": identities[-1], "input": "And?"}
            assert (await asking.call(app, "POST", "/v1/responses", asked)).status == 400

        asyncio.run(scene())


def test_the_document_has_the_field_for_models_that_take_media() -> None:
    from pegboard.plugins.api_openai.chat_body import ChatBody, MediaChatBody

    assert "mm_processor_kwargs" in MediaChatBody.model_json_schema()["properties"]
    assert "mm_processor_kwargs" not in ChatBody.model_json_schema()["properties"]
