"""Anthropic's conversations as chat templates read them: messages with text and images, calls and tools' results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_anthropic.images import image_of

if TYPE_CHECKING:
    from pegboard.toolkit.media.service import MediaReader

MAX_MESSAGES = 100_000
ROLES = ("user", "assistant", "system")
SEPARATOR = "\n"
"""What stands between blocks of text, and between messages of one role that follow each other."""

Content = str | list[object]
"""A text; or a list of parts, with MediaInput among them."""
Block = tuple[str, dict[str, object], str]
"""A block's type, the block, and its place in the request."""


def template_messages(
    system: object, messages: Sequence[object], processor: MediaReader | None = None
) -> list[dict[str, object]]:
    """Return the conversation with OpenAI's roles and fields, which templates are written for.

    A tool's result becomes a message of the role `tool`, with the name that its call had; thinking is kept beside its
    message's text as `reasoning_content`. Messages of one role that follow each other become one, since templates
    insist on turns. For a model whose `processor` reads images, contents with some are lists. Raises InvalidRequest,
    naming the place, for what is malformed or cannot be read.
    """
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"messages may have at most {MAX_MESSAGES} entries", param="messages")
    reader = _Reader(processor)
    converted: list[dict[str, object]] = []
    if text := reader.text(system, "system"):
        converted.append({"role": "system", "content": text})
    for index, message in enumerate(messages):
        for one in reader.message(message, f"messages.{index}"):
            _append(converted, one)
    return converted


def continues(messages: Sequence[object]) -> bool:
    """Return whether the answer goes on where the last message, the assistant's own, ends."""
    return bool(messages) and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant"


class _Reader:
    """Reads messages, one after the other."""

    def __init__(self, processor: MediaReader | None) -> None:
        self._processor = processor
        self._names: dict[str, str] = {}
        """Of calls so far, by their ids."""

    def message(self, message: object, where: str) -> list[dict[str, object]]:
        """Return the messages that one is for a template."""
        if not isinstance(message, dict):
            raise InvalidRequest(f"{where} must be an object", param=where)
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
        if role == "system":
            return [{"role": role, "content": self.text(content, f"{where}.content")}]
        if isinstance(content, str):
            return [{"role": role, "content": content}]
        if not isinstance(content, list):
            raise InvalidRequest(f"{where}.content must be a string or a list of blocks", param=f"{where}.content")
        blocks = _blocks(content, f"{where}.content")
        return [self._assistant(blocks)] if role == "assistant" else self._user(blocks)

    def _user(self, blocks: Sequence[Block]) -> list[dict[str, object]]:
        """Results of tools, texts and images, in the order in which they stand."""
        out: list[dict[str, object]] = []
        for kind, block, where in blocks:
            if kind == "tool_result":
                out.append(self._tool_result(block, where))
            else:
                _append(out, {"role": "user", "content": self._block(kind, block, where)})
        return out or [{"role": "user", "content": ""}]

    def _assistant(self, blocks: Sequence[Block]) -> dict[str, object]:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, object]] = []
        for kind, block, where in blocks:
            if kind == "tool_use":
                calls.append(self._tool_use(block, where))
            elif kind == "thinking":
                thoughts.append(_string(block, "thinking", where))
            elif kind != "redacted_thinking":
                texts.append(self._text_of(kind, block, where))
        message: dict[str, object] = {"role": "assistant", "content": SEPARATOR.join(texts)}
        if thoughts:
            message["reasoning_content"] = SEPARATOR.join(thoughts)
        if calls:
            message["tool_calls"] = calls
        return message

    def _tool_use(self, block: dict[str, object], where: str) -> dict[str, object]:
        identity, name = _string(block, "id", where), _string(block, "name", where)
        arguments = block.get("input")
        if not isinstance(arguments, dict):
            raise InvalidRequest(f"{where}.input must be an object", param=f"{where}.input")
        self._names[identity] = name
        return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _tool_result(self, block: dict[str, object], where: str) -> dict[str, object]:
        identity = _string(block, "tool_use_id", where)
        if identity not in self._names:
            raise InvalidRequest(
                f"{where}.tool_use_id: no tool_use block before it has the id {identity[:64]!r}",
                param=f"{where}.tool_use_id",
            )
        if not isinstance(block.get("is_error") or False, bool):
            raise InvalidRequest(f"{where}.is_error must be true or false", param=f"{where}.is_error")
        told = self._told(block.get("content"), f"{where}.content")
        if block.get("is_error"):
            # No template has a place for it, and the model should know.
            told = f"Error: {told}" if isinstance(told, str) else _joined("Error:", told)
        return {"role": "tool", "tool_call_id": identity, "name": self._names[identity], "content": told}

    def _told(self, content: object, where: str) -> Content:
        """Return what a tool has answered."""
        if self._processor is None or not isinstance(content, list):
            return self.text(content, where)
        blocks = _blocks(content, where)
        if all(kind != "image" for kind, _, _ in blocks):
            return self.text(content, where)
        told: Content = ""
        for kind, block, place in blocks:
            told = _joined(told, self._block(kind, block, place))
        return told

    def _block(self, kind: str, block: dict[str, object], where: str) -> Content:
        if kind == "image" and self._processor is not None:
            return [image_of(block, where, self._processor)]
        return self._text_of(kind, block, where)

    def text(self, content: object, where: str) -> str:
        """Return a string, or blocks of text."""
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            raise InvalidRequest(f"{where} must be a string or a list of blocks", param=where)
        return SEPARATOR.join(self._text_of(kind, block, place) for kind, block, place in _each(content, where))

    def _text_of(self, kind: str, block: dict[str, object], where: str) -> str:
        """Return the text of a block that has nothing else to say."""
        if kind == "text":
            return _string(block, "text", where)
        if kind == "document":
            return self._document(block, where)
        if kind == "search_result":
            head = f"{_string(block, 'title', where)} ({_string(block, 'source', where)})"
            return f"{head}\n{self.text(block.get('content'), f'{where}.content')}"
        if kind == "image":
            takes = "images stand in messages of the user and in results of tools, and nowhere else"
            what = "this model reads text only, no images" if self._processor is None else takes
            raise InvalidRequest(f"{where}: {what}", param=where, code="unsupported")
        raise InvalidRequest(
            f"{where}.type: blocks of type {kind[:64]!r} are not supported here",
            param=f"{where}.type",
            code="unsupported",
        )

    def _document(self, block: dict[str, object], where: str) -> str:
        source = block.get("source")
        kind = source.get("type") if isinstance(source, dict) else None
        if not isinstance(source, dict) or kind not in ("text", "content"):
            raise InvalidRequest(
                f"{where}.source: this model reads text only; of documents those with a source of type text or content",
                param=f"{where}.source",
                code="unsupported",
            )
        inner = f"{where}.source"
        text = (
            _string(source, "data", inner) if kind == "text" else self.text(source.get("content"), f"{inner}.content")
        )
        heads = [_string(block, name, where) for name in ("title", "context") if block.get(name) is not None]
        return SEPARATOR.join([*heads, text])


def _blocks(content: Sequence[object], where: str) -> list[Block]:
    return list(_each(content, where))


def _each(content: Sequence[object], where: str) -> Iterator[Block]:
    for i, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(block, dict) or not isinstance(kind, str):
            raise InvalidRequest(f"{where}.{i} must be an object with a type", param=f"{where}.{i}")
        yield kind, block, f"{where}.{i}"


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return value


def _append(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Add a message, or what it says to the last one of the same role."""
    last = messages[-1] if messages else {}
    if last.get("role") != message["role"] or message["role"] == "tool":
        messages.append(message)
        return
    last["content"] = _joined(last["content"], message["content"])
    for name in ("tool_calls", "reasoning_content"):
        if name in message and name in last:
            last[name] = last[name] + (message[name] if name == "tool_calls" else SEPARATOR + message[name])
        elif name in message:
            last[name] = message[name]


def _joined(first: Content, second: Content) -> Content:
    """Return two contents as one. Between texts there is a line break, between text and an image nothing."""
    if isinstance(first, str) and isinstance(second, str):
        return SEPARATOR.join(filter(None, [first, second]))
    parts = _parts(first)
    for part in _parts(second):
        last = parts[-1] if parts else None
        if isinstance(part, dict) and isinstance(last, dict):
            parts[-1] = {"type": "text", "text": SEPARATOR.join((last["text"], part["text"]))}
        else:
            parts.append(part)
    return parts


def _parts(content: Content) -> list[object]:
    if isinstance(content, list):
        return list(content)
    return [{"type": "text", "text": content}] if content else []
