"""Renders chat templates in a helper process.

It is started as ``python -P -m pegboard.toolkit.chat.render_process SECONDS BYTES``.

A template is code that came with a model, and what it makes of a conversation may take any time and memory. Here it
may: the kernel ends this process when one conversation took SECONDS of computing time, allocations beyond BYTES fail,
and only the request that asked is harmed. Frames come and go on the socket that is its standard input: a length,
four bytes, and MessagePack.
"""

from __future__ import annotations

import resource
import sys

import msgspec

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.chat.chat_prompt import ChatPrompt
from pegboard.toolkit.chat.chat_template import ChatTemplate
from pegboard.toolkit.system.helper_child import computing, limit, serve

MAX_TEMPLATES = 8
"""Compiled templates that are kept."""


class Rendered(msgspec.Struct):
    """What became of a conversation: its text, with the `literals` of a MediaPrompt, or the error that refused it."""

    text: str = ""
    literals: list[tuple[int, int]] = []
    error: str = ""
    param: str | None = None
    code: str = ""


class _Templates:
    """The templates that were asked for last, compiled."""

    def __init__(self) -> None:
        self._compiled: dict[str, ChatTemplate] = {}

    def get(self, source: str) -> ChatTemplate:
        template = self._compiled.pop(source, None) or ChatTemplate(source)
        self._compiled[source] = template
        if len(self._compiled) > MAX_TEMPLATES:
            del self._compiled[next(iter(self._compiled))]
        return template


def _render(data: bytes, templates: _Templates) -> Rendered:
    try:
        prompt = msgspec.msgpack.decode(data, type=ChatPrompt)
        made = prompt.render(templates.get(prompt.source))
        return Rendered(text=made.text, literals=made.literals)
    except InvalidRequest as error:
        return Rendered(error=error.message, param=error.param, code=error.code)
    except MemoryError:
        return Rendered(error="the chat template needs too much memory for these messages", param="messages")
    except Exception as error:
        # Whatever a template can raise is its request's matter, and this process goes on.
        why = f"the chat template cannot render the messages: {type(error).__name__}: {error}"
        return Rendered(error=why[:1000], param="messages")


def main() -> None:
    seconds, memory = float(sys.argv[1]), int(sys.argv[2])
    # No files, no dumps: nothing of a conversation is left behind.
    limit([(resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)])
    templates = _Templates()

    def answer(data: bytes) -> bytes:
        with computing(seconds):
            return msgspec.msgpack.encode(_render(data, templates))

    serve(answer)


if __name__ == "__main__":
    main()
