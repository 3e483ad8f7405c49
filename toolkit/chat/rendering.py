"""For chat APIs: prompts of conversations, rendered in helper processes.

``prompt = await render_chat(self.client, messages, tools=tools, tool_parser=tool_parser_of(ctx), kwargs=...)`` is
all that a route needs. Templates run in a few helper processes (`pegboard.toolkit.chat.render_process`), which end when
one takes too long; the event loop and its thread pool have no part in it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import msgspec

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.chat.chat_prompt import ChatPrompt
from pegboard.toolkit.chat.chat_template import ChatTemplateError, select_source
from pegboard.toolkit.chat.media_parts import MediaParts
from pegboard.toolkit.chat.render_process import Rendered
from pegboard.toolkit.media.service import reader_of
from pegboard.toolkit.parsing.json_weight import JsonTexts
from pegboard.toolkit.system.helper_child import HelperChild, HelperEnded, Look
from pegboard.toolkit.system.helper_pool import HelperKind, HelperPool

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import EngineClient
    from pegboard.toolkit.chat.tool_calls import Tools
    from pegboard.toolkit.media.inputs import MediaPrompt
    from pegboard.toolkit.parsing.output_parser import OutputParser

RENDER_SECONDS = 5.0
"""Computing time that one conversation may take; the clock on the wall allows three times as much."""
RENDER_BYTES = 2 << 30
"""Memory that a helper process may have."""
HELPERS = max(1, min(4, os.cpu_count() or 1))
"""Most helper processes. They start when they are needed, and stay."""
MAX_WAITING = 1024
"""Most conversations that wait for a helper; one more is refused with 503."""

MODULE = "pegboard.toolkit.chat.render_process"


async def render_chat(
    client: EngineClient,
    messages: Sequence[Mapping[str, object]],
    *,
    tools: Tools | None = None,
    tool_parser: OutputParser | None = None,
    kwargs: Mapping[str, object] | None = None,
    hints: Mapping[str, object] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template: str | None = None,
) -> str | MediaPrompt:
    """Return the prompt of a conversation; submit it as it is, with ``add_special_tokens=False``.

    `messages` are in OpenAI's form, with text content; for models that take media also with lists of text parts and
    MediaInput. The prompt is a MediaPrompt where there are media, and where a client's text spells a token of them.
    Tool calls have their arguments as JSON text or as objects, and reach the template as objects, as models expect.
    Templates that read `tools` get them; for others `tool_parser` explains tools in a system message and writes earlier
    calls as text. `kwargs` are the request's chat_template_kwargs: only names that the template reads are allowed.
    `hints` are more of them that reach templates which read them and no others. `continue_final_message` leaves the
    last message open, and needs ``add_generation_prompt=False``. `template` names one of several templates.

    Raises InvalidRequest, with the field's name, for what the template refuses or shows wrongly, for values of the
    wrong shape, a template that takes too long or too much memory (400), and full queues and lost helpers (503).
    """
    active = tools if tools is not None and tools.active else None
    texts, media = JsonTexts(), MediaParts(reader_of(client))
    prompt = ChatPrompt(
        source=select_source(client.tokenizer.chat_templates, name=template, with_tools=active is not None),
        messages=[_message(i, one, texts, media) for i, one in enumerate(messages)],
        tokens=dict(client.tokenizer.named_tokens),
        kwargs=dict(kwargs or {}),
        hints=dict(hints or {}),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )
    media.describe(prompt)
    _add_tools(prompt, active, tool_parser)
    made = await asyncio.wrap_future(_pool().submit(prompt, client.asker))
    return media.prompt(made.text, made.literals)


def _add_tools(prompt: ChatPrompt, tools: Tools | None, parser: OutputParser | None) -> None:
    """Give a prompt its tools, if any may be called, and the parser's words for templates that do not read them."""
    if tools is not None:
        prompt.tools = tools.for_template
    if parser is not None:
        prompt.written = _written(prompt.messages, parser)
        if tools is not None:
            prompt.instructions = parser.instructions(tools.functions)


def warm_up() -> None:
    """Start a helper process, so that the first conversation need not wait for it."""
    _pool().submit(ChatPrompt(source="", messages=[]))


def _message(index: int, message: Mapping[str, object], texts: JsonTexts, media: MediaParts) -> dict[str, object]:
    """As templates expect it: calls have objects for arguments, and nothing is there that is empty."""
    found = dict(message)
    if "content" in found:
        found["content"] = media.take(found["content"])
    calls = found.get("tool_calls")
    if not calls:
        # Templates ask whether the key is there.
        found.pop("tool_calls", None)
        return found
    where = f"messages.{index}.tool_calls"
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where}: must be a list", param=where)
    found["tool_calls"] = [_call(f"{where}.{i}", call, texts) for i, call in enumerate(calls)]
    return found


def _call(where: str, call: object, texts: JsonTexts) -> dict[str, object]:
    call = call if isinstance(call, Mapping) else {}
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{where}.function: must be an object", param=f"{where}.function")
    if not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.function.name: must be a string", param=f"{where}.function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # What is not JSON stays text: a model may have written it so, and been told.
        with contextlib.suppress(ValueError, RecursionError):
            parsed = texts.parse(arguments, f"{where}.function.arguments") if arguments.strip() else {}
            arguments = parsed if isinstance(parsed, dict) else arguments
    elif arguments is None:
        arguments = {}
    elif not isinstance(arguments, Mapping):
        path = f"{where}.function.arguments"
        raise InvalidRequest(f"{path}: must be JSON text", param=path)
    return {**call, "function": {**function, "arguments": arguments}}


def _written(chat: Sequence[Mapping[str, object]], parser: OutputParser) -> dict[int, str]:
    return {
        i: parser.write_calls([call["function"] for call in calls])
        for i, message in enumerate(chat)
        if isinstance(calls := message.get("tool_calls"), list)
    }


class RenderPool:
    """Helper processes for templates, and the queue before them."""

    def __init__(self, *, helpers: int = HELPERS, seconds: float = RENDER_SECONDS, memory: int = RENDER_BYTES) -> None:
        self._seconds = seconds
        self._memory = memory
        kind = HelperKind("chat templates", self._start, self._render, _lost, _closing)
        self._pool: HelperPool[ChatPrompt, Rendered] = HelperPool(kind, helpers=helpers)

    def submit(self, prompt: ChatPrompt, asker: str = "") -> Future[Rendered]:
        """Render it in the turns of who asks. The future may be cancelled. Raises InvalidRequest (503) where too many
        wait.
        """
        if self._pool.unfinished >= MAX_WAITING:
            raise InvalidRequest("too many conversations wait for the chat template", code="overloaded", status=503)
        return self._pool.submit(prompt, asker)

    def close(self) -> None:
        """End the helpers; whatever is under way fails."""
        self._pool.close()

    def pids(self) -> list[int]:
        """Of the helpers that are there."""
        return self._pool.pids()

    def _start(self, look: Look) -> HelperChild:
        try:
            return HelperChild(MODULE, str(self._seconds), str(self._memory))
        except OSError as error:
            message = f"no process for chat templates can be started: {error}"
            raise InvalidRequest(message, code="internal_error", status=500) from None

    def _render(self, helper: HelperChild, prompt: ChatPrompt, look: Look) -> Rendered | InvalidRequest:
        """Have the helper render it, or return what refused it. Raises ChatTemplateError where the template takes too
        long or ends the process.
        """
        try:
            data = msgspec.msgpack.encode(prompt)
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
            return ChatTemplateError(f"the messages cannot be passed to the chat template: {error}")
        try:
            answer = helper.ask(data, 3 * self._seconds + 5, look)
        except TimeoutError:
            # The kernel would have ended it, had it got more computing time.
            raise ChatTemplateError("the chat template takes too long for these messages") from None
        except HelperEnded as ended:
            if ended.code == -signal.SIGPROF:
                raise ChatTemplateError("the chat template takes too long for these messages") from None
            raise ChatTemplateError("the chat template cannot render these messages: its process ended") from None
        made = msgspec.msgpack.decode(answer, type=Rendered)
        if made.error:
            return InvalidRequest(made.error, param=made.param, code=made.code or "chat_template")
        return made


def _lost(why: str) -> InvalidRequest:
    message = f"the process for chat templates was lost twice ({why}), through no fault of the messages; try again"
    return InvalidRequest(message, code="template_helper_lost", status=503)


def _closing() -> InvalidRequest:
    return InvalidRequest("the server is shutting down, try another one", code="shutting_down", status=503)


_the_pool: RenderPool | None = None
_the_pool_lock = threading.Lock()


def _pool() -> RenderPool:
    """Return this process's pool, made at its first use."""
    global _the_pool
    with _the_pool_lock:
        if _the_pool is None:
            _the_pool = RenderPool()
            atexit.register(_the_pool.close)
        return _the_pool
