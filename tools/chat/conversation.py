"""Conversations with an engine in this process: prompts by the model's chat template, answers apart from thoughts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from pegboard.core.config.select import Selection
from pegboard.core.interfaces.errors import PegboardError
from pegboard.toolkit.chat.chat_prompt import ChatPrompt
from pegboard.toolkit.chat.chat_template import ChatTemplates
from pegboard.toolkit.chat.media_parts import MediaParts, prompt_text
from pegboard.toolkit.chat.tool_calls import ChatStream, skip_special_tokens
from pegboard.toolkit.media.service import reader_of
from pegboard.toolkit.parsing.output_parser import OutputParser, OutputParserContext
from pegboard.tools.chat.attachments import check_content, for_template

if TYPE_CHECKING:
    from pegboard.core.engine.engine import Engine
    from pegboard.core.interfaces.sampling import SamplingParams
    from pegboard.toolkit.media.inputs import MediaPrompt

Message = Mapping[str, Any]


def check_messages(messages: Any, *, media: bool = False) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form, with text for content, or with `media` also pictures and videos. Raises
    ValueError saying what is wrong with which.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of objects with role and content, and not empty")
    return [_message(f"messages[{place}]", one, media) for place, one in enumerate(messages)]


def _message(where: str, message: Any, media: bool) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"{where} must be an object with a role")
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        return {**message, "content": None}
    return {**message, "content": check_content(content, f"{where}.content", media=media)}


class Interlocutor:
    """How one engine's model is talked to. Raises PegboardError where it has no chat template."""

    def __init__(self, engine: Engine) -> None:
        self._media = reader_of(engine)
        self._tokenizer = engine.tokenizer
        if not self._tokenizer.has_chat_template:
            raise PegboardError(
                f"{engine.info.served_name} has no chat template, so it cannot be talked to; `pegboard generate` "
                "goes on with raw text"
            )
        self._templates = ChatTemplates(self._tokenizer.chat_templates)
        about = OutputParserContext(
            chat_template="\n".join(self._tokenizer.chat_templates.values()),
            architecture=engine.info.architecture,
            model=engine.info.path,
        )
        self._parser: OutputParser | None = None
        if (contract := engine.resolved.shape.contracts.get("reasoning_parser")) is not None:
            self._parser = Selection(engine.resolved).choose(contract, about).build(about)
        self._skip_special = skip_special_tokens(None, None, self._parser)

    def prompt(self, messages: Sequence[Message], hints: Mapping[str, Any] | None = None) -> str | MediaPrompt:
        """Return what asks for the next message; it is complete, without special tokens to be added. `hints` reach a
        template that reads them. Raises InvalidRequest where the template refuses.
        """
        template, media = self._templates.select(), MediaParts(self._media)
        asked = ChatPrompt(
            source=template.source,
            messages=[{**one, "content": media.take(for_template(one.get("content")))} for one in messages],
            tokens=dict(self._tokenizer.named_tokens),
            hints=dict(hints or {}),
        )
        media.describe(asked)
        made = asked.render(template)
        return media.prompt(made.text, made.literals)

    def sampling(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with which thoughts can be told from the rest: their marks may be special tokens."""
        return params if self._skip_special else msgspec.structs.replace(params, skip_special_tokens=False)

    def reader(self, prompt: str | MediaPrompt, params: SamplingParams) -> ChatStream:
        """Return a reader of one answer to a prompt: its text goes in, content and thoughts come out."""
        # A grammar of the whole answer leaves no room for thoughts.
        constrained = params.grammar is not None and params.grammar.kind != "structural_tag"
        return ChatStream(reasoning_parser=self._parser, prompt=prompt_text(prompt), constrained=constrained)
