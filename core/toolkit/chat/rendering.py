"""For chat APIs: prompts of conversations, rendered where no template can hold up other requests.

``prompt = await render_chat(self.client, messages, tools=tools, tool_parser=ctx.tool_parser, kwargs=...)`` is all that
a route needs. Templates run in a few helper processes (`pegboard.core.toolkit.chat.render_process`), which end when one
takes too long; the event loop and its thread pool have no part in it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import msgspec

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.toolkit.chat.chat_prompt import ChatPrompt
from pegboard.core.toolkit.chat.chat_template import ChatTemplateError, select_source
from pegboard.core.toolkit.chat.media_parts import MediaParts
from pegboard.core.toolkit.chat.render_process import Rendered, frame, read_frame
from pegboard.core.toolkit.parsing.json_weight import JsonTexts
from pegboard.core.toolkit.system.environment import helper_environment
from pegboard.core.toolkit.system.helper_process import HelperLost, Watch, ended_itself

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import EngineClient, MediaPrompt
    from pegboard.core.interfaces.output_parser import OutputParser
    from pegboard.core.toolkit.chat.tool_calls import Tools

RENDER_SECONDS = 5.0
"""Computing time that one conversation may take; the clock on the wall allows three times as much."""
RENDER_BYTES = 2 << 30
"""Memory that a helper process may have."""
ATTEMPTS = 2
"""A conversation whose helper is killed or stopped from outside gets a fresh one, once."""
HELPERS = max(1, min(4, os.cpu_count() or 1))
"""Most helper processes. They start when they are needed, and stay."""
MAX_WAITING = 1024
"""Most conversations that wait for a helper; one more is refused with 503."""


logger = logging.getLogger(__name__)


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
    texts, media = JsonTexts(), MediaParts(client.media)
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
    made = await asyncio.wrap_future(_pool().submit(prompt))
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
    """Helper processes, each with a thread of its own that waits for it, and a queue before them."""

    def __init__(self, *, helpers: int = HELPERS, seconds: float = RENDER_SECONDS, memory: int = RENDER_BYTES) -> None:
        self._seconds = seconds
        self._memory = memory
        self._most = helpers
        self._waiting: queue.SimpleQueue[tuple[ChatPrompt, Future[Rendered]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._helpers: set[_Helper] = set()
        self._unfinished = 0
        self._closed = False

    def submit(self, prompt: ChatPrompt) -> Future[Rendered]:
        """Render it when its turn comes. The future may be cancelled until then. Raises InvalidRequest (503) where too
        many wait.
        """
        future: Future[Rendered] = Future()
        with self._lock:
            if self._closed or self._unfinished >= MAX_WAITING:
                raise InvalidRequest("too many conversations wait for the chat template", code="overloaded", status=503)
            self._unfinished += 1
            if self._unfinished > len(self._threads) and len(self._threads) < self._most:
                thread = threading.Thread(target=self._serve, name=f"render-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._waiting.put((prompt, future))
        return future

    def close(self) -> None:
        """End the helpers; whatever is under way fails."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._waiting.put(None)
            for helper in self._helpers:
                helper.kill()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        helper: _Helper | None = None
        try:
            while (item := self._waiting.get()) is not None:
                prompt, future = item
                if future.set_running_or_notify_cancel():
                    helper = self._settle(helper, prompt, future)
                with self._lock:
                    self._unfinished -= 1
                # Else it would keep this conversation until the next one comes.
                del item, prompt, future
        finally:
            if helper is not None:
                self._end(helper)

    def _settle(self, helper: _Helper | None, prompt: ChatPrompt, future: Future[Rendered]) -> _Helper | None:
        """Have it rendered; the helper for the next one, if this one, or the one that took its place, is still good."""
        why = ""
        for _ in range(ATTEMPTS):
            try:
                helper = helper or self._start()
                _ask(helper, prompt, future)
                return helper
            except HelperLost as lost:
                why = str(lost)
                logger.warning("a process for chat templates was lost: %s", lost)
            except InvalidRequest as error:
                future.set_exception(error)
            if helper is not None:
                self._end(helper)
                helper = None
            if future.done():
                return None
        message = f"the process for chat templates was lost twice ({why}), through no fault of the messages; try again"
        future.set_exception(InvalidRequest(message, code="template_helper_lost", status=503))
        return None

    def _start(self) -> _Helper:
        try:
            helper = _Helper(self._seconds, self._memory)
        except OSError as error:
            message = f"no process for chat templates can be started: {error}"
            raise InvalidRequest(message, code="internal_error", status=500) from None
        with self._lock:
            self._helpers.add(helper)
            if self._closed:
                helper.kill()
        return helper

    def _end(self, helper: _Helper) -> None:
        helper.close()
        with self._lock:
            self._helpers.discard(helper)


def _ask(helper: _Helper, prompt: ChatPrompt, future: Future[Rendered]) -> None:
    """Have the helper render it. Raises ChatTemplateError or HelperLost where the helper is of no use any more."""
    try:
        data = msgspec.msgpack.encode(prompt)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        future.set_exception(ChatTemplateError(f"the messages cannot be passed to the chat template: {error}"))
        return
    answer = helper.ask(data)
    if answer.error:
        future.set_exception(InvalidRequest(answer.error, param=answer.param, code=answer.code or "chat_template"))
    else:
        future.set_result(answer)


class _Helper:
    """One process, and the socket to it."""

    def __init__(self, seconds: float, memory: int) -> None:
        self._seconds = seconds
        self._killed = False
        self._socket, other = socket.socketpair()
        self._socket.setblocking(False)
        command = [sys.executable, "-P", "-m", "pegboard.core.toolkit.chat.render_process", str(seconds), str(memory)]
        # A session of its own: a Ctrl-C in the terminal is not for it.
        env = helper_environment()
        with other:
            try:
                self._process = subprocess.Popen(
                    command, stdin=other.fileno(), stdout=subprocess.DEVNULL, env=env, start_new_session=True
                )
            except OSError:
                self._socket.close()
                raise

    def ask(self, data: bytes) -> Rendered:
        """Render. Raises ChatTemplateError where the template takes too long or ends the process, HelperLost where
        something else ends or stops it.
        """
        watch = Watch(self._process.pid, 3 * self._seconds + 5)
        try:
            self._send(memoryview(frame(data)), watch)
            answer = read_frame(lambda size: self._receive(size, watch))
        except TimeoutError:
            # The process ends by itself after so much computing time: it did not get that.
            raise HelperLost("it got too little computing time") from None
        except OSError:
            answer = None
        if answer is not None:
            return msgspec.msgpack.decode(answer, type=Rendered)
        code = self._ended()
        if code == -signal.SIGPROF:
            raise ChatTemplateError("the chat template takes too long for these messages")
        if code is not None and not ended_itself(code) and not self._killed:
            raise HelperLost(f"it was killed by signal {-code}")
        raise ChatTemplateError("the chat template cannot render these messages: its process ended")

    def _send(self, data: memoryview, watch: Watch) -> None:
        while data:
            watch.wait(self._socket.fileno(), select.POLLOUT)
            data = data[self._socket.send(data) :]

    def _receive(self, size: int, watch: Watch) -> bytes:
        watch.wait(self._socket.fileno(), select.POLLIN)
        return self._socket.recv(size)

    def _ended(self) -> int | None:
        try:
            return self._process.wait(5)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """End the process as it stands; a thread that waits for it learns so."""
        self._killed = True
        self._process.kill()

    def close(self) -> None:
        """End it and forget it."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


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
