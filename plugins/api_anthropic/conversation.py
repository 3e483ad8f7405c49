"""Anthropic's conversations as chat templates read them: messages with text, tool calls and tools' results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pegboard.core.interfaces.errors import InvalidRequest

MAX_MESSAGES = 100_000
ROLES = ("user", "assistant", "system")
SEPARATOR = "\n"
"""What stands between blocks of text, and between messages of one role that follow each other."""


def template_messages(system: object, messages: Sequence[object]) -> list[dict[str, object]]:
    """Return the conversation with OpenAI's roles and fields, which templates are written for.

    A tool's result becomes a message of the role `tool`, with the name that its call had; thinking is kept beside its
    message's text as `reasoning_content`. Messages of one role that follow each other become one, since templates
    insist on turns. Raises InvalidRequest, naming the place, for what is malformed or no text.
    """
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"messages may have at most {MAX_MESSAGES} entries", param="messages")
    converted: list[dict[str, object]] = []
    if text := _text(system, "system"):
        converted.append({"role": "system", "content": text})
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        for one in _converted(message, f"messages.{index}", names):
            _append(converted, one)
    return converted


def continues(messages: Sequence[object]) -> bool:
    """Return whether the answer goes on where the last message, the assistant's own, ends."""
    return bool(messages) and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant"


def _converted(message: object, where: str, names: dict[str, str]) -> list[dict[str, object]]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    if role == "system":
        return [{"role": role, "content": _text(content, f"{where}.content")}]
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content must be a string or a list of blocks", param=f"{where}.content")
    blocks = [(_kind(block, f"{where}.content.{i}"), block, f"{where}.content.{i}") for i, block in enumerate(content)]
    return [_assistant(blocks, names)] if role == "assistant" else _user(blocks, names)


Block = tuple[str, dict[str, object], str]
"""A block's type, the block, and its place in the request."""


def _kind(block: object, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequest(f"{where} must be an object with a type", param=where)
    return kind


def _user(blocks: Sequence[Block], names: dict[str, str]) -> list[dict[str, object]]:
    """Results of tools and texts, in the order in which they stand."""
    out: list[dict[str, object]] = []
    for kind, block, where in blocks:
        if kind == "tool_result":
            out.append(_tool_result(block, where, names))
        else:
            _append(out, {"role": "user", "content": _text_of(kind, block, where)})
    return out or [{"role": "user", "content": ""}]


def _assistant(blocks: Sequence[Block], names: dict[str, str]) -> dict[str, object]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, object]] = []
    for kind, block, where in blocks:
        if kind == "tool_use":
            calls.append(_tool_use(block, where, names))
        elif kind == "thinking":
            thoughts.append(_string(block, "thinking", where))
        elif kind != "redacted_thinking":
            texts.append(_text_of(kind, block, where))
    message: dict[str, object] = {"role": "assistant", "content": SEPARATOR.join(texts)}
    if thoughts:
        message["reasoning_content"] = SEPARATOR.join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_use(block: dict[str, object], where: str, names: dict[str, str]) -> dict[str, object]:
    identity, name = _string(block, "id", where), _string(block, "name", where)
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{where}.input must be an object", param=f"{where}.input")
    names[identity] = name
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool_result(block: dict[str, object], where: str, names: dict[str, str]) -> dict[str, object]:
    identity = _string(block, "tool_use_id", where)
    if identity not in names:
        raise InvalidRequest(
            f"{where}.tool_use_id: no tool_use block before it has the id {identity[:64]!r}",
            param=f"{where}.tool_use_id",
        )
    if not isinstance(block.get("is_error") or False, bool):
        raise InvalidRequest(f"{where}.is_error must be true or false", param=f"{where}.is_error")
    text = _text(block.get("content"), f"{where}.content")
    # No template has a place for it, and the model should know.
    text = f"Error: {text}" if block.get("is_error") else text
    return {"role": "tool", "tool_call_id": identity, "name": names[identity], "content": text}


def _text(content: Any, where: str) -> str:
    """Return a string, or blocks of text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of blocks", param=where)
    return SEPARATOR.join(
        _text_of(_kind(block, f"{where}.{i}"), block, f"{where}.{i}") for i, block in enumerate(content)
    )


def _text_of(kind: str, block: dict[str, object], where: str) -> str:
    """Return the text of a block that has nothing else to say."""
    if kind == "text":
        return _string(block, "text", where)
    if kind == "document":
        return _document(block, where)
    if kind == "search_result":
        head = f"{_string(block, 'title', where)} ({_string(block, 'source', where)})"
        return f"{head}\n{_text(block.get('content'), f'{where}.content')}"
    if kind == "image":
        raise InvalidRequest(f"{where}: this model reads text only, no images", param=where, code="unsupported")
    raise InvalidRequest(
        f"{where}.type: blocks of type {kind[:64]!r} are not supported here", param=f"{where}.type", code="unsupported"
    )


def _document(block: dict[str, object], where: str) -> str:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("text", "content"):
        raise InvalidRequest(
            f"{where}.source: this model reads text only; of documents those with a source of type text or content",
            param=f"{where}.source",
            code="unsupported",
        )
    inner = f"{where}.source"
    text = _string(source, "data", inner) if kind == "text" else _text(source.get("content"), f"{inner}.content")
    heads = [_string(block, name, where) for name in ("title", "context") if block.get(name) is not None]
    return SEPARATOR.join([*heads, text])


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
    last["content"] = SEPARATOR.join(filter(None, [last["content"], message["content"]]))
    for name in ("tool_calls", "reasoning_content"):
        if name in message and name in last:
            last[name] = last[name] + (message[name] if name == "tool_calls" else SEPARATOR + message[name])
        elif name in message:
            last[name] = message[name]
