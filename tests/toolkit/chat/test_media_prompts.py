"""Prompts with media: what the template makes of an item binds, and what a client's text spells does not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.conformance.fake_client import TEMPLATE, FakeEngineClient, FakeTokenizer
from pegboard.conformance.rig.fake_media import FakeMedia, fake_processor
from pegboard.conformance.rig.media_toy import TOKENS
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.options import NoOptions
from pegboard.toolkit.chat.rendering import render_chat
from pegboard.toolkit.chat.tool_calls import Tools
from pegboard.toolkit.media.inputs import MediaPrompt
from pegboard.toolkit.parsing.output_parser import OutputParser, OutputParserContext
from tests.toolkit.chat.media_chats import (
    CHATS,
    NEUTRAL,
    SENTENCES,
    SPELLED,
    TOOLS,
    item,
    neutral,
    spelled,
    text,
    with_items,
)
from tests.toolkit.chat.templates import ONLY_PARTS, PARTS, TEXTS, TOOLS_AND_PARTS

ALL = "{{ note }}" + TOOLS_AND_PARTS
TOGETHER = """\
{% for message in messages %}{% for part in message.content -%}
{% if part.type == 'image' %}<|media|><|image|>{% else %}{{ part.text | trim }}{{ part.more }}{% endif -%}
{% endfor %}{% endfor %}"""
COMPLETING = """\
{% for part in messages[0].content -%}
{% if part.type == 'image' %}<|image|>{% elif part.words %}AROUND{% else %}{{ part.text }}{% endif -%}
{% endfor %}"""
LOOKING = """\
{% for part in messages[0].content -%}
{% if part.type == 'image' %}<|image|>{% elif part.text == 'ge|>' %}ge|>!{% else %}{{ part.text }}{% endif -%}
{% endfor %}"""


def render(messages: Sequence[Mapping[str, object]], *, template: str = PARTS, **more: Any) -> str | MediaPrompt:
    async def scene() -> str | MediaPrompt:
        client = FakeEngineClient(tokenizer=FakeTokenizer(template=template), media=fake_processor())
        return await render_chat(client, messages, **more)

    return asyncio.run(scene())


def user(*content: object) -> list[Any]:
    return [{"role": "user", "content": list(content)}]


def literals(prompt: str | MediaPrompt) -> list[str]:
    assert isinstance(prompt, MediaPrompt)
    return [str(prompt.base)[start:stop] for start, stop in prompt.literals]


def refusal(messages: Sequence[Mapping[str, object]], **more: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        render(messages, **more)
    assert caught.value.status == 400
    return caught.value


class TestWhatTemplatesGet:
    @pytest.mark.parametrize("template", [PARTS, TOOLS_AND_PARTS, ONLY_PARTS], ids=["parts", "tools", "only parts"])
    def test_items_bind_in_order(self, template: str) -> None:
        chat = [
            *user(text("One"), item(1), text("two"), item(2)),
            {"role": "assistant", "content": "So"},
            *user(item(3)),
        ]
        prompt = render(chat, template=template)
        assert isinstance(prompt, MediaPrompt)
        wrapped = "<|image|>" if template is ONLY_PARTS else "<|media|><|image|><|media|>"
        assert f"One{wrapped}two{wrapped}" in str(prompt.base)
        assert [one.place for one in prompt.media] == ["item 1", "item 2", "item 3"]
        assert prompt.literals == ()

    def test_kinds_have_parts_of_their_own(self) -> None:
        prompt = render(user(item(1, "video"), item(2), text("?")))
        assert isinstance(prompt, MediaPrompt)
        assert "<|media|><|video|><|media|><|media|><|image|><|media|>?" in str(prompt.base)

    def test_templates_may_count_items(self) -> None:
        prompt = render(user(item(1), item(2)), kwargs={"add_vision_id": True})
        assert isinstance(prompt, MediaPrompt)
        assert "Picture 1: <|media|><|image|><|media|>Picture 2: " in str(prompt.base)

    def test_a_result_of_a_tool_may_have_pictures(self) -> None:
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        chat: list[Any] = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": [text("Seen: "), item(1)]},
        ]
        prompt = render(chat, template=TOOLS_AND_PARTS)
        assert isinstance(prompt, MediaPrompt)
        assert "<tool_response>\nSeen: <|media|><|image|><|media|>\n</tool_response>" in str(prompt.base)

    def test_texts_without_media_stay_texts(self) -> None:
        assert render([{"role": "user", "content": "Hi"}]) == (
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_templates_of_parts_alone_get_no_texts(self) -> None:
        chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
        assert render(chat, template=ONLY_PARTS) == "system: Be kind.user: Hiassistant:"

    def test_tools_are_explained_after_a_picture(self) -> None:
        class Parser(OutputParser):
            def stream(self, tools: Any = (), *, prompt: str = "") -> Any:
                raise NotImplementedError

            def instructions(self, tools: Any) -> str:
                return " ".join(str(one["description"]) for one in tools)

        parser = Parser(NoOptions(), OutputParserContext("", "", ""))
        tools = Tools(({"name": "look", "description": "Sees <|video|>", "parameters": {}},))
        chat = [{"role": "system", "content": [text("Be kind."), item(1)]}, *user(text("Hi"))]
        prompt = render(chat, tools=tools, tool_parser=parser)
        assert isinstance(prompt, MediaPrompt)
        assert "Be kind.<|media|><|image|><|media|>\n\nSees <|video|><|im_end|>" in str(prompt.base)
        assert literals(prompt) == ["<|video|>"]

    def test_the_final_message_can_stay_open(self) -> None:
        chat = [*user(item(1)), {"role": "assistant", "content": "It is <|image|> "}]
        more: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
        prompt = render(chat, **more)
        assert isinstance(prompt, MediaPrompt)
        assert str(prompt.base).endswith("assistant\nIt is <|image|> ")
        assert literals(prompt) == ["<|image|>"]


class TestWhatIsRefused:
    @pytest.mark.parametrize("template", [TEMPLATE, TEXTS], ids=["prints", "concatenates"])
    def test_templates_without_a_place(self, template: str) -> None:
        error = refusal(user(text("Look"), item(1, place="messages.0.content.1.image_url")), template=template)
        assert error.param == "messages.0.content.1.image_url"
        assert error.message == f"{error.param}: this model's chat template has no place for pictures"
        assert error.code == "chat_template"
        assert render([{"role": "user", "content": "Hi"}], template=template)

    def test_templates_without_a_place_for_one_kind(self) -> None:
        assert "no place for videos" in refusal(user(item(1), item(2, "video")), template=ONLY_PARTS).message

    def test_templates_that_leave_items_out(self) -> None:
        only_users = PARTS.replace("{% for part in", "{% if message.role == 'user' %}{% for part in").replace(
            "{% endfor %}<|im_end|>", "{% endfor %}{% endif %}<|im_end|>"
        )
        assert isinstance(render(user(item(1)), template=only_users), MediaPrompt)
        error = refusal([{"role": "system", "content": [item(1)]}, *user(item(2))], template=only_users)
        assert error.param == "messages"
        assert "chat template leaves out some of the pictures" in error.message

    def test_templates_that_repeat_items(self) -> None:
        twice = PARTS.replace("<|media|><|image|><|media|>", "{{ '<|media|><|image|><|media|>' * messages | length }}")
        assert isinstance(render(user(item(1)), template=twice), MediaPrompt)
        chat = [*user(item(1)), {"role": "assistant", "content": "So"}]
        assert "chat template shows some of the pictures more than once" in refusal(chat, template=twice).message

    def test_models_without_media_take_none(self) -> None:
        with pytest.raises(InvalidRequest, match="item 1: this model reads text only, no pictures") as caught:
            asyncio.run(render_chat(FakeEngineClient(), user(item(1))))
        assert (caught.value.param, caught.value.code) == ("item 1", "unsupported")

    def test_what_is_neither_text_nor_media(self) -> None:
        assert refusal(user(item(1), 0)).param == "messages"

    def test_a_refusal_has_the_texts_as_they_were(self) -> None:
        refusing = PARTS + "{{ raise_exception('not ' + messages[0].content[0].text) }}"
        assert "not <|image|>" in refusal(user(text("<|image|>")), template=refusing).message


class TestSpellings:
    @pytest.mark.parametrize(
        ("around", "words"),
        [
            ("<|{{ part.words }}|>", "image"),
            ("<|ima{{ part.words }}", "ge|> is one"),
            ("{{ part.words }}ge|>", "This <|ima"),
        ],
        ids=["inside", "end", "begin"],
    )
    def test_what_a_template_completes_is_text(self, around: str, words: str) -> None:
        template = COMPLETING.replace("AROUND", around)
        prompt = render(user(item(1), {"type": "text", "words": words}), template=template)
        assert isinstance(prompt, MediaPrompt)
        assert literals(prompt) == ["<|image|>"]
        assert prompt.literals[0][0] >= 9

    @given(chat=CHATS, tools=TOOLS, note=SENTENCES)
    @settings(max_examples=80, deadline=None)
    def test_they_change_nothing_but_themselves(self, chat: list[dict[str, Any]], tools: list[Any], note: str) -> None:
        """The prompt is that of the same conversation with other words, these replaced: each placeholder is one that
        the template made for an item, and the items are bound as they were.
        """
        made = render(with_items(chat), template=ALL, tools=Tools(tuple(tools)), kwargs={"note": note})
        other = render(
            with_items(neutral(chat)), template=ALL, tools=Tools(tuple(neutral(tools))), kwargs={"note": neutral(note)}
        )
        base, places = spelled(other)
        if isinstance(made, str):
            assert (made, places, other) == (base, [], base)
            return
        assert (made.base, list(made.literals)) == (base, places)
        if isinstance(other, str):
            assert made.media == ()
            return
        assert made.media == other.media
        laid_out, alike = FakeMedia(fake_processor()).lay_out(made), FakeMedia(fake_processor()).lay_out(other)
        assert [one.item for one in laid_out.layout.spans] == [
            number for number, one in enumerate(made.media) for _ in range(2 if one.kind == "video" else 1)
        ]
        longer = sum((stop - start) - len(NEUTRAL[base[start:stop]]) for start, stop in places)
        assert len(laid_out.layout.ids) == len(alike.layout.ids) + longer

    @given(
        spelling=st.sampled_from(TOKENS),
        cuts=st.sets(st.integers(1, 8), min_size=1, max_size=3),
        blanks=st.lists(st.sampled_from(("", "", " ", "\n ")), min_size=8, max_size=8),
        where=st.sampled_from(("parts", "messages", "calls")),
    )
    @settings(max_examples=80, deadline=None)
    def test_texts_that_meet_spell_nothing(self, spelling: str, cuts: set[int], blanks: list[str], where: str) -> None:
        ends = [*sorted(one for one in cuts if one < len(spelling)), len(spelling)]
        pieces = [spelling[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]
        padded = [f"{blanks[2 * i % 8]}{one}{blanks[(2 * i + 1) % 8]}" for i, one in enumerate(pieces)]
        if where == "parts":
            chat = user(item(1), *map(text, padded))
        elif where == "messages":
            chat = user(item(1)) + [{"role": "user", "content": [text(one)]} for one in padded]
        else:
            chat = user(item(1), *({**text(one), "more": two} for one, two in zip_longest(padded[::2], padded[1::2])))
        prompt = render(chat, template=TOGETHER)
        assert isinstance(prompt, MediaPrompt)
        assert str(prompt.base).startswith("<|media|><|image|>")
        laid_out = FakeMedia(fake_processor()).lay_out(prompt)
        assert laid_out.layout.spans[0].item == 0
        assert len(laid_out.layout.spans) == 1
        kept = {match.span() for match in SPELLED.finditer(str(prompt.base), len("<|media|><|image|>"))}
        assert set(prompt.literals) == kept

    def test_a_template_that_looks_at_texts_may_not_hide_it(self) -> None:
        """Where it cannot be known what came together, nothing is bound."""
        error = refusal(user(item(1), text("<|ima"), text("ge|>")), template=LOOKING)
        assert "spell a token that means media" in error.message
        assert isinstance(render(user(item(1), text("ge|>"), text("image")), template=LOOKING), MediaPrompt)
