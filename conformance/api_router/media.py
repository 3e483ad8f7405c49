"""The part of ApiRouter's suite that is about models with media: what a client writes is never one of their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from pegboard.conformance.api_router.base import ApiSuite, Sample
from pegboard.conformance.asgi import call
from pegboard.conformance.fake_client import FakeEngineClient, FakeTokenizer
from pegboard.conformance.rig.fake_media import fake_processor
from pegboard.conformance.rig.media_toy import TOKENS
from pegboard.core.interfaces.client import AnnotatedPrompt

TURN = "\u2063turn\u2063"
"""What the chat template below begins each message with, and no client writes."""

TEMPLATE = (
    f"{{% for message in messages %}}{TURN}{{{{ message.role }}}}: "
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|{{ part.type }}|>{% endif %}{% endfor %}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
"""A chat template that reads texts and parts."""

SPELLED = " ".join(TOKENS)


class MediaTests(ApiSuite):
    """What every API owes a model that takes pictures or video, whether or not the API has a way to state them."""

    contract = "api"

    def test_models_with_media_are_served(self) -> None:
        """Texts are answered as they are for any model."""
        for sample in self.generating():
            for way in sample.ways:
                done, client = asyncio.run(self._asked(sample, way, ""))
                assert done.status == 200, f"{sample.path}: a model that takes media gets {done.status}: {done.body!r}"
                assert len(client.finished) == len(client.requests)

    def test_spelled_tokens_stay_text(self) -> None:
        """A text that spells a token which means media is text, in a conversation: only the chat template makes such
        tokens. A raw prompt may have them.
        """
        for sample in self.generating():
            if sample.prompt is None:
                continue
            for way in sample.ways:
                try:
                    done, client = asyncio.run(self._asked(sample, way, SPELLED))
                except Exception as error:
                    pytest.fail(
                        f"{sample.path}: a text that spells {TOKENS[0]} raises {error!r}; `render_chat` may return a "
                        "MediaPrompt"
                    )
                assert done.status == 200, f"{sample.path}: a text that spells {TOKENS[0]} gets {done.body!r}"
                for request in client.requests:
                    self._check(sample, request.prompt)

    async def _asked(self, sample: Sample, way: Mapping[str, Any], padding: str) -> tuple[Any, FakeEngineClient]:
        client = FakeEngineClient(tokenizer=FakeTokenizer(template=TEMPLATE), media=fake_processor())
        body = {**self.asking(sample, 0, padding), **way}
        return await call(self.make_app(client), "POST", sample.path, body), client

    @staticmethod
    def _check(sample: Sample, prompt: str | list[int] | AnnotatedPrompt) -> None:
        base = prompt.base if isinstance(prompt, AnnotatedPrompt) else prompt
        if not isinstance(base, str) or TURN not in base:
            return
        spans = prompt.literals if isinstance(prompt, AnnotatedPrompt) else ()
        kept = {base[start:stop] for start, stop in spans}
        lost = [token for token in TOKENS if token in base and token not in kept]
        assert not lost, (
            f"{sample.path}: {lost[0]} in a client's text reaches the engine as the token that it spells, which means "
            "media; submit what `render_chat` returns as it is"
        )
